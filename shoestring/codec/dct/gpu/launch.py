"""How kernels are launched: as Triton does, but once a kernel is compiled in a few microseconds.

Triton looks at every argument of every launch to find the variant of a kernel that fits, which
takes longer than many a kernel here runs. What decides it is little: the compile-time constants,
the device, and whether each pointer is aligned. So these make the key of a variant. This holds
as long as a kernel with the same constants takes pointers of the same types.
"""

import inspect
import os
import threading
from typing import Any

import triton
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

# What a compiled kernel is called with has changed before; elsewhere Triton launches.
_IS_KNOWN = not INTERPRETED and tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 6)
_ALIGNED = 16
_interpreter = threading.Lock()  # it takes the place of Triton's own functions while it runs


class Kernel:
    """A kernel of Triton: `kernel(grid, *arguments, **constants)`, constants last and by name.

    A parameter is a pointer if its name ends in `_ptr`, a constant if its annotation says so, else
    a number, whose value makes no variant.
    """

    def __init__(self, function: Any) -> None:
        parameters = inspect.signature(function).parameters.values()
        numbers = [p.name for p in parameters if p.annotation is p.empty and not p.name.endswith("_ptr")]
        self.function = triton.jit(function, do_not_specialize=numbers)
        self._variants: dict[tuple[Any, ...], tuple[Any, ...]] = {}

    def __call__(self, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        if INTERPRETED:
            with _interpreter:
                self.function[grid](*arguments, **constants)
            return
        if not _IS_KNOWN:
            self.function[grid](*arguments, **constants)
            return
        driver = triton.runtime.driver.active
        device = driver.get_current_device()
        values, pointers, combined = [], [], 0
        for argument in arguments:
            if isinstance(argument, Tensor):
                argument = argument.data_ptr()
                pointers.append(argument)
                combined |= argument
            values.append(argument)
        key: tuple[Any, ...] = (device, *constants.values())
        if combined % _ALIGNED:  # a rare one, whose pointers are looked at one by one
            key += tuple(pointer % _ALIGNED == 0 for pointer in pointers)
        variant = self._variants.get(key)
        if variant is None:
            compiled = self.function[grid](*arguments, **constants)
            names = self.function.arg_names[len(arguments) :]
            known = [constants[name] for name in names]
            self._variants[key] = compiled, compiled.run, compiled.function, compiled.packed_metadata, known
            return
        _, run, function, metadata, known = variant
        run(
            grid[0], grid[1] if len(grid) > 1 else 1, 1, driver.get_current_stream(device),
            function, metadata, None, None, None, *values, *known,
        )  # fmt: skip


def kernel(function: Any) -> Kernel:
    """Make a kernel of a function, as `triton.jit` does."""
    return Kernel(function)
