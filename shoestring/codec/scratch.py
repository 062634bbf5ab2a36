"""Threads for kernels, and memory that a thread keeps so that kernels never wait for fresh pages."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Made = TypeVar("Made")
Part = TypeVar("Part")

_own = threading.local()


def room(name: str, size: int, dtype: Any) -> NDArray[Any]:
    """Return this thread's array of that name, at least `size` long, contents undefined."""
    return _array(name, size, dtype, np.empty)


def clean_room(name: str, size: int, dtype: Any) -> NDArray[Any]:
    """Return this thread's array of that name; whoever uses it leaves it all zero."""
    return _array(name, size, dtype, np.zeros)


def _array(name: str, size: int, dtype: Any, make: Callable[[int, Any], NDArray[Any]]) -> NDArray[Any]:
    array: NDArray[Any] | None = getattr(_own, name, None)
    if array is None or array.size < size:
        array = make(size, dtype)
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


def run_parts(threads: int, function: Callable[[Part], Made], parts: Sequence[Part]) -> list[Made]:
    """Call `function` with each part, on several threads if allowed. The calling thread is one.

    It begins at once and takes whatever parts the others have not begun, so it waits for no
    thread that is busy elsewhere.
    """
    if threads == 1 or len(parts) <= 1:
        return [function(part) for part in parts]
    results: dict[int, Made] = {}
    waiting = deque(enumerate(parts))

    def work() -> None:
        while True:
            try:
                index, part = waiting.popleft()
            except IndexError:
                return
            results[index] = function(part)

    helpers = [_pool(threads).submit(work) for _ in range(min(threads, len(parts)) - 1)]
    try:
        work()
    finally:
        for helper in helpers:
            if not helper.cancel():
                helper.result()
    return [results[index] for index in range(len(parts))]


def balance(weights: Sequence[float], parts: int) -> list[list[int]]:
    """Deal out numbered pieces of work, so that all parts weigh about the same; the heaviest is first.

    It goes to the calling thread, which need not be woken.
    """
    loads = [0.0] * parts
    dealt: list[list[int]] = [[] for _ in range(parts)]
    for piece in sorted(range(len(weights)), key=lambda k: -weights[k]):
        lightest = loads.index(min(loads))
        loads[lightest] += weights[piece]
        dealt[lightest].append(piece)
    heaviest_first = sorted(range(parts), key=lambda part: -loads[part])
    return [sorted(dealt[part]) for part in heaviest_first if dealt[part]]
