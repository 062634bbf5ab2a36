"""The key of a kernel: a digest of everything its machine code is compiled from.

That is the bytecode of the kernel and of all kernels and intrinsics it calls, in whatever modules
they are, the values of the constants they read, and the options they are compiled with. Comments,
docstrings, line numbers and file names are no part of it: a kernel keeps its key when only those
change. NumPy, Numba and Python count with their versions (`BUILD`), their functions with their names.
"""

import dis
import hashlib
import inspect
import sys
import types
from functools import cache
from typing import Any

import llvmlite
import numba
import numpy as np
from numba.core.dispatcher import Dispatcher
from numba.core.extending import _Intrinsic

BUILD = (sys.implementation.cache_tag, sys.version, numba.__version__, llvmlite.__version__, np.__version__)

_LIBRARIES = {"numpy", "numba", "llvmlite", *sys.stdlib_module_names, *sys.builtin_module_names}
_SIGNATURE_FLAGS = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS | inspect.CO_GENERATOR


def key_of(kernel: Any) -> str:
    """Return the key as text. Constants count with the values they have now, as in a compilation now."""
    key = _Key()
    key.add(kernel)
    return key.digest.hexdigest()


class _Key:
    def __init__(self) -> None:
        self.digest = hashlib.sha256(repr(BUILD).encode())
        self._seen: dict[int, int] = {}  # kernels may call each other in circles

    def add(self, value: Any, attributes: frozenset[str] = frozenset()) -> None:
        """Add a value; of a module only `attributes`."""
        if isinstance(value, Dispatcher):
            options = [f"{name}={_text(option)}" for name, option in value.targetoptions.items()]
            self._write("kernel", *sorted(options))
            self._add_function(value.py_func)
        elif isinstance(value, _Intrinsic):
            self._write("intrinsic")
            self._add_function(value._defn)
        elif isinstance(value, types.ModuleType):
            self._write("module", value.__name__)
            if not _is_of_library(value.__name__):
                self._add_names(vars(value), attributes, attributes)
        elif isinstance(value, types.FunctionType) and not _is_of_library(value.__module__):
            self._add_function(value)
        elif callable(value) and hasattr(value, "__qualname__"):  # a class, or a function of a library
            self._write("name", value.__module__ or "", value.__qualname__)
        elif isinstance(value, (tuple, list)):
            self._write(type(value).__qualname__, str(len(value)))
            for item in value:
                self.add(item)
        elif isinstance(value, (np.ndarray, np.generic)):
            order = value.flags.c_contiguous, value.flags.f_contiguous
            self._write("array", type(value).__name__, repr(value.dtype), repr(value.shape), repr(order))
            self.digest.update(value.tobytes())
        else:
            self._write(_text(value))

    def _add_function(self, function: types.FunctionType) -> None:
        if id(function) in self._seen:
            self._write("again", str(self._seen[id(function)]))
            return
        self._seen[id(function)] = len(self._seen)
        text, names, attributes = _read(function.__code__)
        self._write("function", text)
        self.add(function.__defaults__)
        self.add(tuple((function.__kwdefaults__ or {}).items()))
        self._add_names(function.__globals__, names, attributes)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self._write("read", name)
            self.add(cell.cell_contents, attributes)

    def _add_names(self, values: dict[str, Any], names: frozenset[str], attributes: frozenset[str]) -> None:
        for name in sorted(names & values.keys()):
            self._write("read", name)
            self.add(values[name], attributes)

    def _write(self, *words: str) -> None:
        for word in words:
            self.digest.update(f"{len(word)}:{word},".encode())


@cache
def _read(code: types.CodeType) -> tuple[str, frozenset[str], frozenset[str]]:
    """Return a function's instructions as text, the global names it reads, and all attributes."""
    arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    words = [repr((arguments, code.co_kwonlyargcount, code.co_flags & _SIGNATURE_FLAGS))]
    words.append(repr(code.co_exceptiontable))
    names: set[str] = set()
    attributes: set[str] = set()
    for step in dis.get_instructions(code):
        value = step.argval
        if isinstance(value, types.CodeType):
            value, inner_names, inner_attributes = _read(value)
            names |= inner_names
            attributes |= inner_attributes
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            names.add(value)
        elif step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            attributes.add(value)
        words.append(f"{step.opname} {_text(value)}")
    return "\n".join(words), frozenset(names), frozenset(attributes)


def _text(value: Any) -> str:
    """Return a constant as text that no other constant has, in every process the same."""
    if isinstance(value, (set, frozenset)):
        return f"{type(value).__name__} {sorted(map(_text, value))}"
    if isinstance(value, tuple):
        return f"tuple {list(map(_text, value))}"
    text = f"{type(value).__name__} {value!r}"
    if " at 0x" in text:
        raise TypeError(f"a kernel reads {text}, of which no key can be made")
    return text


def _is_of_library(module: str | None) -> bool:
    return (module or "").partition(".")[0] in _LIBRARIES
