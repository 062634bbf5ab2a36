"""Run a trace through a scheduling objective without a device: Gavel's rounds and rules.

- Time goes in rounds. A round ends when the last job in it stops: after
  `round_s`, or sooner when all that run are done.
- A job that runs makes `int(speed * round_s)` whole steps, and is done when its
  last step is. Two jobs that share are both done with the later of the two.
- A job that arrives during a round takes part from the next one on; its
  completion time counts from its arrival.
- A job that starts on devices it was not on in the round before, also for the
  first time, first loses `restart_cost_s`. Jobs stay on their devices where the
  plan lets them.

The outcome is a pure function of the arguments, but for `decisions_s`.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from shoestring.errors import FleetError
from shoestring.fleet.allocate.allocator import allocate
from shoestring.fleet.allocate.placement import Names, Places, place_jobs
from shoestring.fleet.allocate.plan import Demand, Objective, Placement, Plan, Pool, served_by
from shoestring.fleet.simulate.fifo import GavelFifo
from shoestring.fleet.simulate.throughputs import Throughputs
from shoestring.fleet.simulate.trace import TraceJob

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Settings:
    """Settings of a simulation, apart from its jobs and devices."""

    objective: Objective | Literal["fifo"] = "jct"
    packing: bool = False
    round_s: float = 360.0
    restart_cost_s: float = 0.0
    seed: int = 0


@dataclass
class Outcome:
    """When jobs were done, and what was decided on the way. `end_s` is when the last one was."""

    completion_s: dict[int, float] = field(default_factory=dict)
    start_s: float = 0.0
    end_s: float = 0.0
    busy_s: float = 0.0
    cost: float = 0.0
    rounds: int = 0
    starts: int = 0
    late: int = 0
    decisions_s: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)

    def figures(self, devices: int, watch: range | None = None) -> dict[str, float]:
        """Sum up; completion times are of the jobs in `watch`, all else of the whole run."""
        times = sorted(t for number, t in self.completion_s.items() if watch is None or number in watch)
        span = self.end_s - self.start_s
        return {
            "average_jct_s": sum(times) / len(times),
            "median_jct_s": statistics.median(times),
            "p99_jct_s": times[math.ceil(0.99 * len(times)) - 1],
            "makespan_s": self.end_s,
            "utilisation": self.busy_s / (devices * span) if span > 0 else 0.0,
            "decision_ms": 1000 * sum(self.decisions_s) / len(self.decisions_s),
            "decision_ms_max": 1000 * max(self.decisions_s),
            "gap": sum(self.gaps) / len(self.gaps) if self.gaps else 0.0,
            "jobs": len(times),
            "late_jobs": self.late,
            "rounds": self.rounds,
            "starts": self.starts,
            "cost": self.cost,
        }


@dataclass
class _Live:
    job: TraceJob
    name: str
    speeds: dict[str, float]
    left: int
    running_on: str | None = None


def simulate(
    jobs: Sequence[TraceJob],
    throughputs: Throughputs,
    pools: Sequence[Pool],
    settings: Settings,
    *,
    watch: range | None = None,
    progress: Progress | None = None,
) -> Outcome:
    """Run the jobs to their ends; with `watch` only until the jobs of those numbers are done."""
    _check(jobs, throughputs, pools)
    simulation = Simulation(jobs, throughputs, pools, settings)
    wanted = {job.number for job in jobs if watch is None or job.number in watch}
    if not wanted:
        raise FleetError(f"the trace has no jobs {watch}", hint=f"it has jobs 0 to {len(jobs) - 1}")
    while not wanted <= simulation.outcome.completion_s.keys():
        simulation.round()
        if progress is not None:
            progress("jobs done", len(simulation.outcome.completion_s.keys() & wanted), len(wanted))
    return simulation.outcome


class Simulation:
    """The state between rounds; `placements` and `places` are what was decided for the last round."""

    def __init__(
        self, jobs: Sequence[TraceJob], throughputs: Throughputs, pools: Sequence[Pool], settings: Settings
    ) -> None:
        self._queue = list(jobs)[::-1]
        self._throughputs = throughputs
        self._pools = pools
        self._settings = settings
        self._prices = {pool.kind: pool.cost_per_hour / 3600 for pool in pools}
        self._fifo = (
            GavelFifo(pools, settings.round_s, settings.seed) if settings.objective == "fifo" else None
        )
        self._kinds = {f"{pool.kind}-{n}": pool.kind for pool in pools for n in range(pool.count)}
        self._devices: dict[str, Names] = {}
        self.placements: Sequence[Placement] = ()
        self.places = Places({}, frozenset(), frozenset())
        self._live: dict[str, _Live] = {}
        self._ends: dict[str, float] = {}
        self._last: Plan | None = None
        self._now = jobs[0].arrival_s
        self.outcome = Outcome(start_s=self._now, end_s=self._now)

    def round(self) -> None:
        """Let jobs arrive, decide, and run one round."""
        if not self._live and self._queue:
            self._now = max(self._now, self._queue[-1].arrival_s)
        while self._queue and self._queue[-1].arrival_s <= self._now:
            self._arrive(self._queue.pop())
        self.placements = placements = self._decide()
        for live in self._live.values():
            live.running_on = None
        self._ends.clear()
        self.outcome.rounds += 1
        if not placements:
            self._idle()
            return
        self._place(placements)
        start, self._now = self._now, max(self._play(place) for place in placements)
        for place in placements:
            for name in place.jobs:
                if self._live[name].left <= 0:
                    self._finish(self._live[name])
                elif self._fifo is not None:
                    self._fifo.note_run(name, place.kind, self._ends[name] - start)
        self.outcome.end_s = self._now

    def _arrive(self, job: TraceJob) -> None:
        kinds = [pool.kind for pool in self._pools if pool.count >= job.devices]
        speeds = self._throughputs.speeds(job.kind_of_work, job.devices, kinds)
        live = _Live(job, str(job.number), speeds, job.steps)
        self._live[live.name] = live
        if self._fifo is not None:
            self._fifo.note_start(live.name)

    def _decide(self) -> Sequence[Placement]:
        demands = [self._demand(live) for live in self._live.values()]
        start = time.perf_counter()
        if self._fifo is not None:
            placements: Sequence[Placement] = self._fifo.decide(self._now, demands)
        elif self._settings.objective != "fifo":
            plan = allocate(
                demands,
                self._pools,
                objective=self._settings.objective,
                pairs=self._throughputs if self._settings.packing else None,
                restart_cost_s=self._settings.restart_cost_s,
                round_s=self._settings.round_s,
                time_limit_s=60.0,
                last=self._last,
            )
            self._last, placements = plan, plan.placements
            self.outcome.gaps += [] if plan.gap is None else [plan.gap]
        self.outcome.decisions_s.append(time.perf_counter() - start)
        return placements

    def _place(self, placements: Sequence[Placement]) -> None:
        """Choose the devices of this round."""
        self.places = place_jobs(placements, self._kinds, self._devices)
        for place in placements:
            if place.jobs[0] not in self.places.devices:
                count = list(self._kinds.values()).count(place.kind)
                raise FleetError(
                    f"the plan gives out more than the {count} `{place.kind}`",
                    hint="plan again for these devices",
                )
        self._devices = dict(self.places.devices)
        self.outcome.starts += len(self.places.starting)

    def _demand(self, live: _Live) -> Demand:
        job, waited = live.job, self._now - live.job.arrival_s
        return Demand(
            live.name,
            job.kind_of_work,
            live.left,
            live.speeds,
            devices=job.devices,
            weight=job.weight,
            deadline_s=None if job.deadline_s is None else job.deadline_s - waited,
            running_on=live.running_on,
            waited_s=waited,
            served=served_by(job.steps - live.left, waited, live.speeds, self._pools),
        )

    def _play(self, place: Placement) -> float:
        """Run one placement for a round; return when it stops."""
        end = self._now
        for name, speed in zip(place.jobs, place.speeds, strict=True):
            lost = self._settings.restart_cost_s if name in self.places.starting else 0.0
            # At least one step, so that very slow work gets done too.
            steps = min(max(1, int(speed * max(0.0, self._settings.round_s - lost))), self._live[name].left)
            self._live[name].left -= steps
            end = max(end, self._now + lost + steps / speed)
        for name in place.jobs:
            self._live[name].running_on = place.kind
            self._ends[name] = end
        self.outcome.busy_s += place.devices * (end - self._now)
        self.outcome.cost += place.devices * (end - self._now) * self._prices[place.kind]
        return end

    def _finish(self, live: _Live) -> None:
        took = self._ends[live.name] - live.job.arrival_s
        self.outcome.completion_s[live.job.number] = took
        self.outcome.late += live.job.deadline_s is not None and took > live.job.deadline_s
        del self._live[live.name]
        self._devices.pop(live.name, None)
        if self._fifo is not None:
            self._fifo.note_end(live.name)

    def _idle(self) -> None:
        if self._fifo is not None:
            self._fifo.note_idle()
        if self._queue:
            self._now = max(self._now, self._queue[-1].arrival_s)
        elif self._fifo is None:
            why = next(iter(self._last.waiting.values())) if self._last else "nothing was decided"
            raise FleetError(f"nothing runs: {why}", hint="give a larger `--cluster`")


def _check(jobs: Sequence[TraceJob], throughputs: Throughputs, pools: Sequence[Pool]) -> None:
    if not jobs:
        raise FleetError("there are no jobs to simulate", hint="give a trace with at least one")
    for pool in pools:
        if pool.kind not in throughputs.kinds:
            raise FleetError(
                f"the throughputs have no device kind `{pool.kind}`",
                hint=f"they have {', '.join(throughputs.kinds)}",
            )
    for job in jobs:
        kinds = [pool.kind for pool in pools if pool.count >= job.devices]
        if not throughputs.speeds(job.kind_of_work, job.devices, kinds):
            raise FleetError(
                f"job {job.number} (`{job.kind_of_work}` on {job.devices} devices) runs on no device here",
                hint="give more devices in `--cluster`, or throughputs that have its kind of work",
            )
