"""How kernels are compiled: without the GIL, and kept on disk under the digest of their source.

Numba notices a change in the file of a kernel, but not in a file that the kernel calls
into, and a stale kernel would decode other bits. So compiled code is kept in a folder
named after all of this package's sources.

`encode_jit` may fuse multiply and add, as encoders are free to round. `decode_jit` may
not: what a decoder computes is defined to the bit. `sum_jit` may reorder sums too.
"""

import hashlib
import os
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from numba.core import config

Kernel = Callable[..., Any]

_config: Any = config

_lock = threading.Lock()


def _find_folder() -> str:
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    root = _config.CACHE_DIR or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return str(Path(root) / "shoestring" / "kernels" / digest.hexdigest()[:16])


_FOLDER = _find_folder()


def _compile(function: Kernel, fastmath: set[str] | bool) -> Kernel:
    decorate = numba.njit(nogil=True, cache=True, error_model="numpy", fastmath=fastmath)
    with _lock:  # Numba reads the folder from its configuration while it decorates
        before, _config.CACHE_DIR = _config.CACHE_DIR, _FOLDER
        try:
            kernel: Kernel = decorate(function)
        finally:
            _config.CACHE_DIR = before
    return kernel


def specialise(
    compiler: Callable[[Kernel], Kernel], template: Any, suffix: object, **constants: Any
) -> Kernel:
    """Compile a copy of `template` in which some of its module's names are constants.

    A closure would do as well, but Numba finds compiled closures on disk in no later process.
    """
    name = f"{template.__name__}_{suffix}"
    function = types.FunctionType(template.__code__, {**template.__globals__, **constants}, name)
    function.__qualname__ = name
    function.__module__ = template.__module__
    return compiler(function)


def encode_jit(function: Kernel) -> Kernel:
    return _compile(function, {"contract"})


def decode_jit(function: Kernel) -> Kernel:
    return _compile(function, False)


def sum_jit(function: Kernel) -> Kernel:
    return _compile(function, {"contract", "reassoc"})
