"""Threads that go through the phases of one call together, so that it costs little to have them.

To code a bucket takes some phases, each of which all threads share (`turns.py`), and between
them a little that one thread does alone. To wake a thread takes some 50 microseconds, about as
long as a small phase. So a helper that has come for one phase stays for the next: it watches the
list that phase will take its turns from, in compiled code and without the GIL, until somebody
takes the first turn. Nobody ever depends on a helper: one that comes late, or waits too long and
goes, is not missed. After a call it watches out for another for a fraction of a millisecond:
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
    """What is to be done by whoever is there, and the phase that will follow."""

    def __init__(self) -> None:
        self.turns = new_turns()  # the first turn that is taken opens the phase
        self.next: _Phase | None = None  # set before it opens
        self._work: Callable[[Turns], Any] | None = None
        self._lock = threading.Lock()
        self._is_over = False
        self._helpers = 0
        self._made: list[Any] = []
        self._error: BaseException | None = None

    def lead(self, work: Callable[[Turns], Made]) -> list[Made]:
        """Do what there is together with the helpers that come; return what each call gave."""
        self._work = work
        try:
            own = work(self.turns)
        finally:
            with self._lock:
                self._is_over = True
            take_turn(self.turns)  # had nobody taken one, helpers would still wait for this phase
            await_count(self.turns, self._helpers)
        if self._error is not None:
            raise self._error
        return [own, *self._made]

    def help(self) -> None:
        """Take part, unless all is done already."""
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
    """The threads of one call: its own, and up to `threads - 1` helpers. Use it as a context."""

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
        """Call `work` on this thread, and on those helpers that are there; return what each gave.

        Calls helpers if it is worth `threads` threads and fewer have been called. The calls share the
        work out among themselves by the turns they are given.
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
        """Go along from phase to phase, on a helper's thread."""
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
    """Helpers that wait to be called. An executor would do, but takes longer than a small part to code."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Crew] = SimpleQueue()
        self._called = new_turns()  # counts the calls
        self._lock = threading.Lock()
        self._size = 0

    def grow(self, size: int) -> None:
        """Have at least so many helpers."""
        if self._size >= size:
            return
        with self._lock:
            while self._size < size:
                name = f"shoestring-codec-{self._size + 1}"
                try:
                    threading.Thread(target=self._serve, name=name, daemon=True).start()
                except RuntimeError:  # no more threads to be had: it is done without
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
            del crew  # what it works on is not to be kept
            if self._calls.empty():
                linger(self._called, known)


_pool = _Pool()


def _start_anew() -> None:
    """Forget helpers that a forked process does not have."""
    global _pool
    _pool = _Pool()


os.register_at_fork(after_in_child=_start_anew)


def warm_up() -> None:
    """Compile what threads wait with: a call so small that it has no helpers does not."""
    turns = new_turns()
    take_turn(turns)
    watch(turns)
    linger(turns, 0)
    give_back(turns)
    await_count(turns, 1)
