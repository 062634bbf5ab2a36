"""Tell a tracker how a run goes, from the events that workers write.

The first worker does. Where the event logs of the other workers are in the same folder, as with
`shoestring run` on one machine, the loss is the mean of all and the lag is known; else the
numbers are its own. Trackers may wait for a network, so they are told in a thread of its own, and a
tracker that fails ends the tracking, not the training.
"""

import math
import queue
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from shoestring.observe.events import Tail
from shoestring.observe.progress import Board, Summary
from shoestring.observe.trackers import Tracker

_QUEUED = 256  # events that wait for a slow tracker; later ones are dropped
_CLOSE_S = 30.0

Event = Mapping[str, Any]


class Rows:
    """Turns the first worker's `step` events into rows of numbers."""

    def __init__(self, folder: Path | None) -> None:
        self._board = Board()
        self._tail = Tail(folder) if folder is not None else None
        if self._tail is not None:
            self._tail.poll()  # what an earlier run in the same folder did

    def row(self, event: Event) -> tuple[int, dict[str, float]]:
        """The step of a `step` event, and its numbers by name; those that are not known are left out."""
        board = self._board
        if self._tail is not None:
            for other in self._tail.poll():
                if other.get("worker") != event["worker"]:
                    board.add(other)
        board.add(event)
        board.take_notes()
        steps, loss = event["steps"], event["loss"]
        summary = Summary.of(board.current)
        lags = [lag for state in board.current if (lag := board.lag(state.worker)) is not None]
        values: dict[str, float | None] = {
            "loss": summary.loss if loss is None or math.isfinite(loss) else loss,
            "samples_per_s": summary.samples_per_s,
            "up_bytes_per_step": _number(event, "up_bytes", 1 / steps),
            "down_bytes_per_step": _number(event, "down_bytes", 1 / steps),
            "smaller": summary.compression,
            "waiting": _number(event, "waited_s", 1 / event["seconds"]),
            "level": _number(event, "level"),
            "lag": max(lags) if len(lags) > 1 else None,
        }
        return event["step"], {name: float(value) for name, value in values.items() if value is not None}


class Tracking:
    """Tells a tracker, in a thread of its own."""

    def __init__(self, tracker: Tracker, folder: Path | None, notice: Callable[[str], None]) -> None:
        self._tracker = tracker
        self._rows = Rows(folder)
        self._notice = notice
        self._events: queue.Queue[Event | None] = queue.Queue(_QUEUED)
        self._thread = threading.Thread(target=self._run, name="tracker", daemon=True)
        self._thread.start()

    def add(self, event: Event) -> None:
        """Take a `step` event of this worker's."""
        if not self._events.full():
            self._events.put_nowait(event)

    def close(self) -> None:
        """Tell what has not been told; a tracker that hangs is left behind after a while."""
        with suppress(queue.Full):
            self._events.put(None, timeout=_CLOSE_S)
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        try:
            while (event := self._events.get()) is not None:
                self._tracker.write(*self._rows.row(event))
            self._tracker.close()
        except Exception as error:  # another library's, of any kind
            self._notice(f"nothing is tracked any more, training goes on: {error!r}")
            while self._events.get() is not None:
                pass


def _number(event: Event, name: str, factor: float = 1.0) -> float | None:
    value = event.get(name)
    return None if value is None else value * factor
