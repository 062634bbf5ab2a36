"""One life of a job: from its start on some devices until its process ends.

It follows the job's event log, so it knows how far the job is and how fast, without asking
the process anything. A speed is that of a window: it begins anew when another job comes to
the device or leaves it, and passes over the first steps of a life.
"""

from dataclasses import dataclass
from typing import Any

from shoestring.fleet.engine.base import Running, Task
from shoestring.fleet.engine.devices import Device
from shoestring.observe.events import Tail

_PASSED_OVER = 3  # steps: the first of a life are slower
_SHORTEST_S = 3.0
_FEWEST = 5


@dataclass
class Life:
    """A task that runs, and what its events say."""

    job: str
    work: str  # the kind of work: code and batch size
    task: Task
    running: Running
    predicted_steps_s: float
    steps: int | None = None  # of the whole job, None until it reports
    stop_by: float | None = None  # asked to stop, it is ended at this time of the clock
    partner: str = ""  # the kind of work that shares its device
    _first: int | None = None
    _window: tuple[int, float] | None = None
    _last: tuple[int, float] | None = None

    def __post_init__(self) -> None:
        self._tail = Tail(self.task.folder)
        self._tail.poll()  # passes over the events of earlier lives

    @property
    def devices(self) -> tuple[Device, ...]:
        return self.task.devices

    @property
    def kind(self) -> str:
        return self.devices[0].kind

    @property
    def device_names(self) -> tuple[str, ...]:
        return tuple(device.name for device in self.devices)

    @property
    def place(self) -> str:
        """The names of its devices, as the database keeps them."""
        return "+".join(self.device_names)

    def follow(self) -> None:
        """Take in the events since the last look."""
        for event in self._tail.poll():
            step, at = event.get("step"), event.get("at")
            if event.get("event") == "step" and isinstance(step, int) and isinstance(at, float):
                self._step(step, at, event)

    def share_with(self, work: str) -> None:
        """Note which kind of work shares the device from now on; none: the job has it alone."""
        if work != self.partner:
            self.partner, self._window = work, None

    def speed(self) -> tuple[float, float] | None:
        """Steps a second in the present window and the window's seconds; None while it is too short."""
        if self._window is None or self._last is None:
            return None
        steps, seconds = self._last[0] - self._window[0], self._last[1] - self._window[1]
        if seconds < _SHORTEST_S or steps < _FEWEST:
            return None
        return steps / seconds, seconds

    def restart_window(self) -> None:
        """Begin a new window: the present one was counted."""
        self._window = self._last

    def _step(self, step: int, at: float, event: dict[str, Any]) -> None:
        if event.get("worker") not in (None, 0):
            return
        if self._first is None:
            self._first = step
        self.steps = step
        self._last = (step, at)
        if self._window is None and step - self._first >= _PASSED_OVER:
            self._window = self._last
