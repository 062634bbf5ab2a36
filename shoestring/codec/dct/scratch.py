"""Threads for kernels, and memory that a thread keeps so that kernels never wait for fresh pages."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Made = TypeVar("Made")

_own = threading.local()


def room(name: str, size: int, dtype: Any) -> NDArray[Any]:
    """Return this thread's array of that name, at least `size` long, contents undefined."""
    array: NDArray[Any] | None = getattr(_own, name, None)
    if array is None or array.size < size:
        array = np.empty(size, dtype)
        setattr(_own, name, array)
    return array


def clean_room(name: str, size: int, dtype: Any) -> NDArray[Any]:
    """Return this thread's array of that name; whoever uses it leaves it all zero."""
    array: NDArray[Any] | None = getattr(_own, name, None)
    if array is None or array.size < size:
        array = np.zeros(size, dtype)
        setattr(_own, name, array)
    return array


def owned(name: str, make: Callable[[], Made]) -> Made:
    """Return what this thread has made under that name, made now if it is new."""
    made: Made | None = getattr(_own, name, None)
    if made is None:
        made = make()
        setattr(_own, name, made)
    return made


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="shoestring-codec")


def run_parts(threads: int, function: Callable[..., Any], parts: Sequence[Any]) -> list[Any]:
    """Call `function` with each part, on several threads if allowed."""
    if threads == 1 or len(parts) <= 1:
        return [function(part) for part in parts]
    return list(_pool(threads).map(function, parts))
