"""How kernels are compiled: without the GIL, and kept on disk (`store.py`).

`encode_jit` may fuse multiply and add, as encoders are free to round. `decode_jit` may
not: what a decoder computes is defined to the bit. `sum_jit` may reorder sums too.

Kernels do not count references to arrays. Numba puts the counters of two threads' arrays often into
one cache line, and then two threads are as slow as one. So kernels that several threads run
allocate no arrays; kernels that allocate arrays use `making_jit` and `making_sum_jit`.
"""

import types
from collections.abc import Callable
from functools import partial
from typing import Any

import numba

from shoestring.compiled.store import StoredKernel

Kernel = Callable[..., Any]


def _compile(function: Kernel, fastmath: set[str] | bool, makes_arrays: bool = False) -> Kernel:
    options: dict[str, Any] = {"_nrt": makes_arrays}
    kernel: Any = numba.njit(nogil=True, error_model="numpy", fastmath=fastmath, **options)(function)
    kernel._cache = StoredKernel(kernel)
    return kernel  # type: ignore[no-any-return]


def specialise(
    compiler: Callable[[Kernel], Kernel], template: Any, suffix: object, **constants: Any
) -> Kernel:
    """Compile a copy of `template` in which some of its module's names are constants.

    Its key is made of these constants (`key.py`), so each copy has a file of its own on disk.
    """
    name = f"{template.__name__}_{suffix}"
    function = types.FunctionType(template.__code__, {**template.__globals__, **constants}, name)
    function.__qualname__ = name
    function.__module__ = template.__module__
    return compiler(function)


encode_jit = partial(_compile, fastmath={"contract"})
decode_jit = partial(_compile, fastmath=False)
sum_jit = partial(_compile, fastmath={"contract", "reassoc"})
making_jit = partial(_compile, fastmath=False, makes_arrays=True)
making_sum_jit = partial(_compile, fastmath={"contract", "reassoc"}, makes_arrays=True)


@decode_jit
def copy(source, first, target, start, count):
    """Copy `count` values; assigning a slice would allocate memory."""
    own, there = source[first : first + count], target[start : start + count]
    for i in range(count):
        there[i] = own[i]
