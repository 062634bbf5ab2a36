"""How long a decision of the fleet takes, and how far it is from the best, as fleets grow.

Jobs are drawn: kinds of work with speeds on five kinds of device that favour
the faster ones unequally, a load that says how two of them slow each other,
memory, one to eight devices at once, and remaining times from half an hour to a
week. The gap is against the plan's own bound, which holds for every choice of
the round, pairs included. A decision that breaks a promise is not timed.
"""

import random
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shoestring.errors import FleetError
from shoestring.fleet.allocate.allocator import allocate
from shoestring.fleet.allocate.plan import Demand, Objective, Plan, Pool

GIB = 1 << 30
KINDS = (("k80", 1.0, 12), ("p100", 2.6, 16), ("t4", 3.0, 16), ("v100", 5.0, 32), ("a100", 11.0, 40))
SIZES = ((1, 0.8), (2, 0.1), (4, 0.07), (8, 0.03))
FULL = ((100, 50), (1_000, 500), (10_000, 5_000))
QUICK = ((100, 50), (300, 150))
WORKS = 40


@dataclass(frozen=True)
class Row:
    """One size of fleet: seconds a decision took (middle and most), and the gap to the bound.

    `cpu_s` is the processor time of the middle one, which a busy machine does not stretch.
    """

    jobs: int
    devices: int
    kinds: int
    objective: str
    decision_s: float
    decision_s_max: float
    cpu_s: float
    gap: float
    gap_max: float
    placed: int
    packed: int
    solver: str


class Loads:
    """Pairs by a simple law: two jobs that ask for more than a device has slow each other evenly.

    What a kind of work asks for is drawn for the fastest kind; slower ones are fuller with it.
    """

    def __init__(self, loads: dict[str, float]) -> None:
        self._loads = loads
        fastest = max(rate for _, rate, _ in KINDS)
        self._fuller = {kind: (fastest / rate) ** 0.2 for kind, rate, _ in KINDS}

    def together(self, a: Demand, b: Demand, kind: str) -> tuple[float, float] | None:
        loads = [min(1.0, self._loads[d.kind_of_work] * self._fuller[kind]) for d in (a, b)]
        crowd = 1.05 * max(1.0, sum(loads))
        return a.speeds[kind] / crowd, b.speeds[kind] / crowd


def draw_fleet(
    jobs: int, devices: int, seed: int, works: int = WORKS
) -> tuple[list[Demand], list[Pool], Loads]:
    """Draw jobs, about `devices` devices of five kinds, and how pairs slow each other."""
    draw = random.Random(seed)
    pools = [
        Pool(kind, devices // len(KINDS) + (at < devices % len(KINDS)), memory * GIB, price)
        for at, (kind, price, memory) in enumerate(KINDS)
    ]
    made = []
    for at in range(works):
        base, favour = 10 ** draw.uniform(-0.5, 1.5), draw.uniform(0.2, 1.2)
        speeds = {kind: base * rate**favour * draw.uniform(0.8, 1.2) for kind, rate, _ in KINDS}
        made.append((f"work-{at}", speeds, draw.uniform(0.4, 0.9), int(draw.uniform(1, 11) * GIB)))
    demands = []
    for number in range(jobs):
        work, speeds, _, memory = draw.choice(made)
        count = draw.choices([size for size, _ in SIZES], [odds for _, odds in SIZES])[0]
        steps = 10 ** draw.uniform(3.3, 5.8) * speeds["v100"]
        demands.append(
            Demand(
                f"job-{number}",
                work,
                steps,
                {kind: speed * count**0.9 for kind, speed in speeds.items()},
                devices=count,
                memory_bytes=dict.fromkeys(speeds, memory),
            )
        )
    return demands, pools, Loads({work: load for work, _, load, _ in made})


def measure(jobs: int, devices: int, objective: Objective, seeds: Sequence[int]) -> Row:
    """Time one decision a seed."""
    plans, cpu = [], []
    for seed in seeds:
        demands, pools, pairs = draw_fleet(jobs, devices, seed)
        start = time.process_time()
        plan = allocate(demands, pools, objective=objective, pairs=pairs, time_limit_s=60.0)
        cpu.append(time.process_time() - start)
        check(plan, demands, pools)
        plans.append(plan)
    times, gaps = [plan.decision_s for plan in plans], [plan.gap or 0.0 for plan in plans]
    return Row(
        jobs,
        devices,
        len(KINDS),
        objective,
        statistics.median(times),
        max(times),
        statistics.median(cpu),
        statistics.median(gaps),
        max(gaps),
        sum(len(place.jobs) for place in plans[0].placements),
        sum(place.is_packed for place in plans[0].placements),
        plans[0].solver,
    )


def check(plan: Plan, demands: Iterable[Demand], pools: Iterable[Pool], margin: float = 0.1) -> None:
    """Refuse a plan that gives out more than there is, forgets a job, or names one twice."""
    by_name = {demand.job: demand for demand in demands}
    names = [job for place in plan.placements for job in place.jobs] + list(plan.waiting)
    if sorted(names) != sorted(by_name) or set(plan.reasons) != set(by_name):
        raise FleetError("the plan does not name every job once", hint="report this")
    used = plan.devices_in_use()
    for pool in pools:
        if used.get(pool.kind, 0) > pool.count:
            raise FleetError(
                f"the plan gives out {used[pool.kind]} of {pool.count} `{pool.kind}`", hint="report this"
            )
    memory = {pool.kind: pool.memory_bytes for pool in pools}
    for place in plan.placements:
        own = [by_name[job] for job in place.jobs]
        have = memory[place.kind]
        if {demand.devices for demand in own} != {place.devices}:
            raise FleetError(f"`{place.jobs}` got {place.devices} devices", hint="report this")
        if have is not None and all(demand.memory_bytes for demand in own):
            need = sum((demand.memory_bytes or {})[place.kind] for demand in own)
            if need > have * (1 - margin if place.is_packed else 1):
                raise FleetError(f"`{place.jobs}` need {need} of {have} bytes", hint="report this")
