"""Signals as exceptions, so that what a launcher started is stopped whichever way it is told to end."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def signals_as_exceptions() -> Iterator[None]:
    """Make SIGTERM and SIGHUP end this process as Ctrl-C does: by an exception, after the stop."""

    def leave(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = [signal.getsignal(number) for number in _ENDING]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in _ENDING[1:]:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number, handler in zip(_ENDING, before, strict=True):
            signal.signal(number, handler)


@contextmanager
def signals_ignored() -> Iterator[None]:
    """Ignore them meanwhile: a stop is under way, and is to be finished."""
    before = [signal.signal(number, signal.SIG_IGN) for number in _ENDING]
    try:
        yield
    finally:
        for number, handler in zip(_ENDING, before, strict=True):
            signal.signal(number, handler)
