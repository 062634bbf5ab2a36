"""Scratch arrays of a thread, allocated once and used again, so that kernels never wait for fresh pages."""

import math
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Made = TypeVar("Made")

_own = threading.local()


_LINES = 128  # bytes: two cache lines, which processors fetch together


def apart(shape: int | tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """Return zeros that share no cache line with other memory, so that writes slow no other thread."""
    size = math.prod(shape) if isinstance(shape, tuple) else shape
    pad = _LINES // np.dtype(dtype).itemsize
    padded: NDArray[Any] = np.zeros(size + 2 * pad, dtype)
    return padded[pad : pad + size].reshape(shape)


def room(name: str, size: int, dtype: Any) -> NDArray[Any]:
    """Return this thread's array of that name, at least `size` long, contents undefined."""
    array: NDArray[Any] | None = getattr(_own, name, None)
    if array is None or array.size < size:
        array = apart(size, dtype)
        setattr(_own, name, array)
    return array


def clean_room(name: str, size: int, dtype: Any) -> NDArray[Any]:
    """Like `room`, for an array that is all zero before and after each use."""
    return room(name, size, dtype)


def owned(name: str, make: Callable[[], Made]) -> Made:
    """Return this thread's object of that name; call `make` the first time."""
    made: Made | None = getattr(_own, name, None)
    if made is None:
        made = make()
        setattr(_own, name, made)
    return made
