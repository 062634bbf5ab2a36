"""Gavel's traces: the jobs of a simulation, one a line.

A line has ten fields with tabs between: kind of work, command, folder, name of
the steps flag, whether data is needed, steps, devices, priority weight,
deadline in s after the arrival (-1: none), arrival in s. Lines come in order
of arrival; the number of a job is the number of its line, from 0.
"""

import math
from dataclasses import dataclass
from pathlib import Path

from shoestring.errors import FleetError

MAX_BYTES = 64 << 20
MAX_DEVICES = 4096

_FIELDS = 10


@dataclass(frozen=True)
class TraceJob:
    """One line of a trace."""

    number: int
    kind_of_work: str
    steps: int
    devices: int
    weight: float
    deadline_s: float | None
    arrival_s: float


def read_trace(path: Path) -> list[TraceJob]:
    """Read and check a trace."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise FleetError(f"`{path.name}` has more than {MAX_BYTES} bytes", hint="give a trace")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise FleetError(f"`{path}` cannot be read: {error.strerror}", hint="check the path") from None
    except UnicodeDecodeError:
        raise FleetError(f"`{path.name}` is no text", hint="give a trace in Gavel's format") from None
    jobs: list[TraceJob] = []
    for line in text.splitlines():
        if line.strip():
            jobs.append(_parse(line, len(jobs), path.name))
            if len(jobs) > 1 and jobs[-1].arrival_s < jobs[-2].arrival_s:
                raise _broken(path.name, len(jobs), "an arrival after the line before", jobs[-1].arrival_s)
    if not jobs:
        raise FleetError(f"`{path.name}` has no jobs", hint="give a trace in Gavel's format")
    return jobs


def _parse(line: str, number: int, name: str) -> TraceJob:
    fields = line.split("\t")
    if len(fields) != _FIELDS:
        raise _broken(name, number + 1, f"{_FIELDS} fields with tabs between", f"{len(fields)} fields")
    work, *_, steps, devices, weight, deadline, arrival = fields
    try:
        values = [float(text) for text in (steps, devices, weight, deadline, arrival)]
    except ValueError:
        raise _broken(name, number + 1, "numbers in the last five fields", line[-60:]) from None
    if not all(map(math.isfinite, values)):
        raise _broken(name, number + 1, "finite numbers", line[-60:])
    if values[0] < 1 or not 1 <= values[1] <= MAX_DEVICES or values[2] <= 0 or values[4] < 0:
        raise _broken(name, number + 1, "steps, devices and weight above 0, arrival from 0", line[-60:])
    deadline_s = values[3] if values[3] > 0 else None
    return TraceJob(number, work, int(values[0]), int(values[1]), values[2], deadline_s, values[4])


def _broken(name: str, line: int, expected: str, found: object) -> FleetError:
    return FleetError(
        f"`{name}` line {line}: found `{found}`, expected {expected}", hint="give a trace in Gavel's format"
    )
