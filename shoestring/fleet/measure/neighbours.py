"""The same job on a machine's other CPU devices, while it is timed on one of them.

Cores of one machine slow each other: they share caches, memory and, as hyperthreads, the core
itself. A fleet keeps all its devices busy, so a step is timed while they are.

The timed task and its neighbours wait for each other at the gate of a trial, behind their first
step (`fleet/contract.py`), and go on together: so all of them train while steps are timed, and
no neighbour comes to its own end before, however different their starts.

A measurement does not fail with a neighbour: one that cannot be started, ends early or is late
does not count, and `missing` names it.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from shoestring.errors import FleetError
from shoestring.fleet.contract import TrialRequest
from shoestring.fleet.engine.base import Engine, Running, Task
from shoestring.fleet.engine.devices import Device

_NEVER = 10**9  # the steps and seconds after which a neighbour would end by itself
_LATE_S = 60.0  # beyond the timed task's own start
_LOOK_S = 0.02


@dataclass
class Neighbour:
    """A task on one of the other devices. `problem` is why it does not count."""

    task: Task
    running: Running | None
    problem: str = ""

    def is_out(self) -> bool:
        """Say whether the task was not started, is late or has ended."""
        code = self.running.poll() if self.running is not None else None
        if code is not None and not self.problem:
            self.problem = f"the job ended there with exit code {code}"
        return bool(self.problem)


@dataclass
class Neighbours:
    """The timed task and the tasks beside it. The timed task waits for them at its gate."""

    timed: Task
    beside: Sequence[Neighbour]

    def gather(self, running: Running, timeout_s: float) -> None:
        """Let all go on together once each has taken a step, the timed task and those that count."""
        if not self.beside:
            return
        _wait(running, lambda: _has_stepped(self.timed), timeout_s)
        _wait(running, lambda: all(_has_stepped(one.task) or one.is_out() for one in self.beside), _LATE_S)
        for one in self.beside:
            if not one.is_out() and not _has_stepped(one.task):
                one.problem = f"the job took no step there within {_LATE_S:.0f} s"
        gate = _request_of(self.timed).gate
        assert gate is not None  # `start_neighbours` has set it
        gate.touch()

    def missing(self) -> dict[str, str]:
        """Name the devices that have not trained up to now, and say why."""
        return {one.task.devices[0].name: one.problem for one in self.beside if one.is_out()}


@contextlib.contextmanager
def start_neighbours(engine: Engine, task: Task, devices: Sequence[Device]) -> Iterator[Neighbours]:
    """Start a task's neighbours, not the task itself; none is left when the `with` ends."""
    if devices:
        task = _gated(task)
    with contextlib.ExitStack() as ending:
        beside = []
        for device in devices:
            one = _start(engine, _beside(task, device))
            if one.running is not None:
                ending.callback(one.running.kill)
            beside.append(one)
        yield Neighbours(task, beside)


def _gated(task: Task) -> Task:
    gate = task.folder / "gate"
    gate.unlink(missing_ok=True)
    return _asked(task, replace(_request_of(task), gate=gate))


def _beside(task: Task, device: Device) -> Task:
    folder = task.folder / f"beside-{device.name}"
    request = replace(_request_of(task), result=folder / "trial.json", steps=_NEVER, seconds=_NEVER)
    beside = replace(
        task,
        name=f"{task.name}-beside",
        devices=(device,),
        folder=folder,
        memory_bytes=device.usable_bytes,
    )
    return _asked(beside, request)


def _asked(task: Task, request: TrialRequest) -> Task:
    """The same task with another request; the sign that an earlier one left is removed."""
    request.ready.unlink(missing_ok=True)
    return replace(task, environment={**task.environment, **request.to_environment()})


def _request_of(task: Task) -> TrialRequest:
    request = TrialRequest.of(task.environment)
    if request is None:
        raise ValueError(f"task `{task.name}` is no trial")
    return request


def _start(engine: Engine, task: Task) -> Neighbour:
    try:
        return Neighbour(task, engine.start(task))
    except (FleetError, OSError) as error:
        return Neighbour(task, None, f"the job could not be started there: {error}")


def _wait(running: Running, is_so: Callable[[], bool], timeout_s: float) -> None:
    """Wait until something is so; no longer than the timed task runs."""
    deadline = time.monotonic() + timeout_s
    while not is_so() and running.wait(_LOOK_S) is None and time.monotonic() < deadline:
        pass


def _has_stepped(task: Task) -> bool:
    return _request_of(task).ready.exists()
