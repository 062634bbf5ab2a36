"""Memory that a thread keeps between calls, so that kernels never wait for fresh pages."""

import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
