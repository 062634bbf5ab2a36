"""Threads for kernels, and memory that a thread keeps so that kernels never wait for fresh pages."""

import math
import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

Made = TypeVar("Made")

_own = threading.local()


_LINES = 128  # bytes: what processors fetch together


def apart(shape: int | tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """Return zeros that share no cache line with anything else: what one thread writes slows no other."""
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
    """Return this thread's array of that name; whoever uses it leaves it all zero."""
    return room(name, size, dtype)


def owned(name: str, make: Callable[[], Made]) -> Made:
    """Return what this thread has made under that name, made now if it is new."""
    made: Made | None = getattr(_own, name, None)
    if made is None:
        made = make()
        setattr(_own, name, made)
    return made


class _Call(Generic[Made]):
    """One call of `work` that a helper may make, unless it comes too late."""

    def __init__(self, work: Callable[[], Made]) -> None:
        self._work = work
        self._claim, self._over = threading.Lock(), threading.Lock()
        self._over.acquire()
        self._made: Made | None = None
        self._error: BaseException | None = None

    def run(self) -> None:
        """Make the call, on a helper's thread."""
        if not self._claim.acquire(blocking=False):
            return
        try:
            self._made = self._work()
        except BaseException as error:  # raised again where the result is asked for
            self._error = error
        self._over.release()

    def result(self) -> list[Made]:
        """Wait for a call that has begun; one that has not is never made and has no result."""
        if self._claim.acquire(blocking=False):
            return []
        self._over.acquire()
        if self._error is not None:
            raise self._error
        return [cast(Made, self._made)]


class _Crew:
    """Helpers that wait for calls. An executor would do, but takes longer than a small part to code."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[_Call[Any]] = SimpleQueue()
        self._lock = threading.Lock()
        self._size = 0

    def grow(self, size: int) -> None:
        """Have at least so many helpers."""
        with self._lock:
            while self._size < size:
                self._size += 1
                name = f"shoestring-codec-{self._size}"
                threading.Thread(target=self._serve, name=name, daemon=True).start()

    def call(self, work: Callable[[], Made]) -> _Call[Made]:
        call = _Call(work)
        self._calls.put(call)
        return call

    def _serve(self) -> None:
        while True:
            self._calls.get().run()


_crew = _Crew()


def _start_anew() -> None:
    """Forget helpers that a forked process does not have."""
    global _crew
    _crew = _Crew()


os.register_at_fork(after_in_child=_start_anew)


def run_on(threads: int, work: Callable[[], Made]) -> list[Made]:
    """Call `work` on up to so many threads at once and return what each call gave.

    The calling thread begins right away, and the calls share the work out among themselves
    (`dct/turns.py`): a thread that has not begun by the time all is done is not waited for.
    """
    if threads == 1:
        return [work()]
    _crew.grow(threads - 1)
    calls = [_crew.call(work) for _ in range(threads - 1)]
    results = []
    try:
        results.append(work())
    finally:
        for call in calls:
            results += call.result()
    return results
