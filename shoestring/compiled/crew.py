"""A crew: the calling thread and helper threads that share the work of one call.

Coding a bucket takes several phases. All threads of the crew share the work of a phase
(`turns.py`); between two phases the calling thread works alone. Waking a thread takes about 50
microseconds, as long as a small phase. So a helper stays for the next phase: in compiled code,
without the GIL, it watches that phase's turns until a thread takes the first one. A phase never
depends on a helper: a helper that comes late, or stops watching, leaves its work to the other
threads. After a call a helper watches for the next call for a fraction of a millisecond, because
buckets come one after the other.
"""

import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from types import TracebackType
from typing import Any, TypeVar

from shoestring.compiled.turns import Turns, await_count, give_back, linger, new_turns, take_turn, watch

Made = TypeVar("Made")

_CLOSED = -1


class _Phase:
    """The work of one phase, and the phase that follows it."""

    def __init__(self) -> None:
        self.turns = new_turns()  # taking the first turn opens the phase
        self.next: _Phase | None = None  # set before this phase opens
        self._work: Callable[[Turns], Any] | None = None
        self._lock = threading.Lock()
        self._is_over = False
        self._helpers = 0
        self._made: list[Any] = []
        self._error: BaseException | None = None

    def lead(self, work: Callable[[Turns], Made]) -> list[Made]:
        """Call `work` on this thread while helpers do too; return the results of all calls."""
        self._work = work
        try:
            own = work(self.turns)
        finally:
            with self._lock:
                self._is_over = True
            take_turn(self.turns)  # opens the phase for helpers that watch it, if `work` took no turn
            await_count(self.turns, self._helpers)
        if self._error is not None:
            raise self._error
        return [own, *self._made]

    def help(self) -> None:
        """Call `work` on a helper's thread, unless the phase is over."""
        with self._lock:
            if self._is_over or self._work is None:
                return
            self._helpers += 1
        try:
            self._made.append(self._work(self.turns))
        except BaseException as error:  # raised again by `lead`
            self._error = error
        give_back(self.turns)


class Crew:
    """The calling thread and up to `threads - 1` helpers. A context manager: its end frees the helpers."""

    def __init__(self, threads: int) -> None:
        self._most = threads - 1
        self._called = 0
        self._phase = _Phase()

    def __enter__(self) -> "Crew":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._phase.turns[0] = _CLOSED

    def run(self, threads: int, work: Callable[[Turns], Made]) -> list[Made]:
        """Run one phase: call `work` on this thread and on present helpers; return all results.

        `threads` is how many threads the phase is worth; missing helpers are called. Every call gets
        the same turns and takes pieces of work by them.
        """
        if self._most == 0:
            return [work(new_turns())]
        while self._called < min(threads - 1, self._most):
            self._called += 1
            _pool.call(self)
        phase = self._phase
        phase.next = after = _Phase()
        try:
            return phase.lead(work)
        finally:
            self._phase = after

    def help(self) -> None:
        """Help in one phase after another, on a helper's thread, until the crew ends or pauses too long."""
        phase = self._phase
        while True:
            seen = watch(phase.turns)
            if seen <= 0:
                break
            phase.help()
            assert phase.next is not None
            phase = phase.next
        if seen != _CLOSED:
            self._called -= 1


class _Pool:
    """Helper threads that wait for a crew to call. An executor takes longer than coding a small part."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Crew] = SimpleQueue()
        self._called = new_turns()  # one turn a call
        self._lock = threading.Lock()
        self._size = 0

    def grow(self, size: int) -> None:
        """Start threads until there are `size` helpers."""
        if self._size >= size:
            return
        with self._lock:
            while self._size < size:
                name = f"shoestring-codec-{self._size + 1}"
                try:
                    threading.Thread(target=self._serve, name=name, daemon=True).start()
                except RuntimeError:  # the system allows no more threads; crews work with fewer
                    return
                self._size += 1

    def call(self, crew: Crew) -> None:
        self.grow(crew._most)
        if self._size:
            self._calls.put(crew)
            take_turn(self._called)

    def _serve(self) -> None:
        while True:
            crew = self._calls.get()
            known = int(self._called[0])
            crew.help()
            del crew  # frees the memory that the crew works on
            if self._calls.empty():
                linger(self._called, known)


_pool = _Pool()


def _start_anew() -> None:
    """Start a new pool in a forked process, which has none of its parent's threads."""
    global _pool
    _pool = _Pool()


os.register_at_fork(after_in_child=_start_anew)


def warm_up() -> None:
    """Compile the kernels that threads wait in; a call without helpers runs none of them."""
    turns = new_turns()
    take_turn(turns)
    watch(turns)
    linger(turns, 0)
    give_back(turns)
    await_count(turns, 1)
