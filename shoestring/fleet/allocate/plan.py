"""Questions to the allocator and its answer: pools and demands; placements, which make up a plan.

Devices of one kind are alike, so a plan counts them: it says that a job gets
2 of the 12 `v100`, not which two. All classes are values; nothing here decides.
Times are seconds from now, memory is bytes on one device, a speed is the job's
steps a second on all the devices it asks for.

A plan names every job that was asked about exactly once: in a placement or
under `waiting`, and either way `reasons` has one sentence for it.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from shoestring.errors import FleetError

Objective = Literal["jct", "makespan", "fair", "cost"]
Solver = Literal["highs", "greedy", "kept"]


@dataclass(frozen=True)
class Pool:
    """All devices of one kind. `memory_bytes` is one device's; without it memory is not checked."""

    kind: str
    count: int
    memory_bytes: int | None = None
    cost_per_hour: float = 0.0

    def __post_init__(self) -> None:
        if self.count < 0:
            raise _wrong(f"`{self.kind}` has {self.count} devices", "give 0 or more")
        if self.memory_bytes is not None and self.memory_bytes < 0:
            raise _wrong(f"`{self.kind}` has {self.memory_bytes} bytes of memory", "give 0 or more")
        if not (math.isfinite(self.cost_per_hour) and self.cost_per_hour >= 0):
            raise _wrong(f"`{self.kind}` costs {self.cost_per_hour} an hour", "give 0 or more")


@dataclass(frozen=True)
class Demand:
    """One job: the steps it has left, the devices it needs, and its speed on each kind.

    `speeds` lists the kinds it can run on; a kind that is missing, or has speed
    0, is one it cannot use. `kind_of_work` is equal for jobs that behave alike
    (the same model and batch): they share measurements of pairs. `devices` are
    needed all at once and of one kind. `deadline_s` is counted from now.
    `running_on` is the kind it runs on at this moment. `waited_s` is how long it
    has been in the fleet and `served` its steps a second over that time, as a
    part of its mean speed over all devices (`served_by`); `fair` goes by it.
    """

    job: str
    kind_of_work: str
    remaining_steps: float
    speeds: Mapping[str, float]
    devices: int = 1
    weight: float = 1.0
    deadline_s: float | None = None
    memory_bytes: Mapping[str, int] | None = None
    running_on: str | None = None
    waited_s: float = 0.0
    served: float = 0.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.remaining_steps) and self.remaining_steps > 0):
            raise _wrong(
                f"job `{self.job}` has {self.remaining_steps} steps left", "plan only unfinished jobs"
            )
        if self.devices < 1:
            raise _wrong(f"job `{self.job}` asks for {self.devices} devices", "give 1 or more")
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise _wrong(f"job `{self.job}` has priority {self.weight}", "give a number above 0")
        for kind, speed in self.speeds.items():
            if not (math.isfinite(speed) and speed >= 0):
                raise _wrong(f"job `{self.job}` runs {speed} steps/s on `{kind}`", "profile it again")


class Pairs(Protocol):
    """Knows how two jobs slow each other on one device."""

    def together(self, a: Demand, b: Demand, kind: str) -> tuple[float, float] | None:
        """Return the steps/s of `a` and of `b` sharing devices of `kind`; None if they cannot."""
        ...


@dataclass(frozen=True)
class Placement:
    """One job, or two that share, on `devices` devices of `kind`; `speeds` in the jobs' order."""

    kind: str
    jobs: tuple[str, ...]
    devices: int
    speeds: tuple[float, ...]

    @property
    def is_packed(self) -> bool:
        return len(self.jobs) > 1


@dataclass(frozen=True)
class Plan:
    """Which job runs where until the next decision, and why.

    `score` is what the objective gives these placements, `bound` what no plan
    can exceed (the relaxed problem's optimum, in the same unit), None where it
    is not known. `solver` is `kept` when this is the last plan, still standing.
    `end_s` is set for `makespan`: the time before which no schedule ends.
    """

    placements: tuple[Placement, ...]
    waiting: Mapping[str, str] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)
    objective: str = "jct"
    solver: Solver = "greedy"
    score: float = 0.0
    bound: float | None = None
    decision_s: float = 0.0
    end_s: float | None = None

    def placement_of(self, job: str) -> Placement | None:
        """Return where `job` runs; None if it waits or is not in the plan."""
        return next((place for place in self.placements if job in place.jobs), None)

    def why(self, job: str) -> str:
        """Say in one sentence why `job` is where it is, or what it waits for."""
        if job not in self.reasons:
            raise FleetError(f"the plan has no job `{job}`", hint="see the jobs with `shoestring fleet ls`")
        return self.reasons[job]

    def devices_in_use(self) -> dict[str, int]:
        """Count the devices given out, by kind."""
        return Counter(kind for place in self.placements for kind in [place.kind] * place.devices)

    @property
    def gap(self) -> float | None:
        """How far the score is below the bound, as a part of the bound."""
        if self.bound is None:
            return None
        return 0.0 if self.bound <= 0 else max(0.0, (self.bound - self.score) / self.bound)


def served_by(steps: float, waited_s: float, speeds: Mapping[str, float], pools: Iterable[Pool]) -> float:
    """Return `Demand.served` of a job that has made `steps` in `waited_s`."""
    pools = list(pools)
    mean = sum(speeds.get(pool.kind, 0.0) * pool.count for pool in pools) / max(
        1, sum(p.count for p in pools)
    )
    return steps / (waited_s * mean) if waited_s > 0 and mean > 0 else 0.0


def check_names(demands: Iterable[Demand], pools: Iterable[Pool]) -> None:
    """Refuse two jobs, or two pools, of one name."""
    for what, names in (("job", [d.job for d in demands]), ("device kind", [p.kind for p in pools])):
        seen: set[str] = set()
        for name in names:
            if name in seen:
                raise FleetError(f"{what} `{name}` is given twice", hint="give each a name of its own")
            seen.add(name)


def _wrong(found: str, hint: str) -> FleetError:
    return FleetError(found, hint=hint)
