"""The interface of an engine, which starts tasks on devices: on one machine or on a cluster.

`local.py` is the engine of this machine, `ray.py` that of a Ray cluster. An engine knows devices
and processes; it knows no jobs and no plan.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from shoestring.fleet.engine.devices import Device


@dataclass(frozen=True)
class Task:
    """One life of a job: a script on some devices.

    `folder` takes its output (`output.log`) and its event logs. `every` is the steps between
    checkpoints, 0: none. `memory_bytes` is the most it may take of one device, 0: no limit.
    """

    name: str
    command: Sequence[str]  # the script and its arguments
    devices: tuple[Device, ...]
    folder: Path
    checkpoint: Path | None = None
    every: int = 0
    memory_bytes: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)


class Running(Protocol):
    """A task that was started."""

    def poll(self) -> int | None:
        """Return the exit code as a shell counts it; None while it runs."""
        ...

    def wait(self, timeout_s: float) -> int | None:
        """Return the exit code when it has ended; None when it has not within the time."""
        ...

    def ask_stop(self) -> None:
        """Ask it to end behind its next checkpoint. Returns at once."""
        ...

    def withdraw_stop(self) -> None:
        """Take back that it was asked to stop; it may have ended already, or be about to."""
        ...

    def kill(self) -> None:
        """End it and all its children now; returns when they are gone."""
        ...


class Engine(Protocol):
    """Starts tasks on devices. Close it: nothing it started is left then."""

    @property
    def devices(self) -> Sequence[Device]: ...

    def neighbours(self, device: Device) -> Sequence[Device]:
        """The other CPU devices of a CPU device's machine, which it shares caches and memory with."""
        ...

    def start(self, task: Task) -> Running: ...

    def close(self) -> None: ...
