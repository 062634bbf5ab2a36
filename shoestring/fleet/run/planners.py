"""Planners: functions that turn estimates into a plan. `--planner` names them.

`plan` asks the allocator. The two others are yardsticks to compare it with, which look at
nothing but the order of the jobs: `fifo` gives each free device to the job that has waited
longest, and never moves a job; `even` runs all jobs at once, dealt to the devices in turn, two
to a device where there are more jobs than devices.
"""

from collections.abc import Callable
from functools import partial

from shoestring.errors import UsageError
from shoestring.fleet.allocate.plan import Demand, Objective, Placement, Plan
from shoestring.fleet.run.estimate import Estimates

Planner = Callable[[Estimates, Plan | None], Plan]  # from the estimates and the last plan

PLANNERS = ("plan", "fifo", "even")


def make_planner(name: str, objective: Objective = "jct", *, round_s: float = 60.0) -> Planner:
    """Return the planner of this name; `objective` and `round_s` are for the allocator."""
    if name == "plan":
        return partial(best, objective=objective, round_s=round_s)
    yardsticks: dict[str, Planner] = {"fifo": fifo, "even": even}
    if name not in yardsticks:
        raise UsageError(f"`--planner {name}` names no planner", hint=f"one of {', '.join(PLANNERS)}")
    return yardsticks[name]


def best(estimates: Estimates, last: Plan | None, *, objective: Objective, round_s: float) -> Plan:
    """The allocator's plan."""
    from shoestring.fleet.allocate.allocator import allocate  # it brings the solver: not for every command

    return allocate(
        estimates.demands,
        estimates.pools,
        objective=objective,
        pairs=estimates.pairs,
        restart_cost_s=estimates.restart_cost_s,
        round_s=round_s,
        last=last,
    )


def fifo(estimates: Estimates, last: Plan | None) -> Plan:
    """First come, first served, on whatever is free."""
    free = {pool.kind: pool.count for pool in estimates.pools}
    placements, waiting, reasons = [], {}, {}
    for demand in sorted(estimates.demands, key=lambda d: d.running_on is None):  # those that run stay
        kinds = [demand.running_on] if demand.running_on else list(free)
        kind = next((k for k in kinds if k in demand.speeds and free[k] >= demand.devices), None)
        if kind is None:
            waiting[demand.job] = reasons[demand.job] = f"`{demand.job}` waits for its turn"
            continue
        free[kind] -= demand.devices
        placements.append(_alone(demand, kind))
        reasons[demand.job] = f"`{demand.job}` runs on {kind}: it was its turn"
    return Plan(tuple(placements), waiting, reasons, objective="fifo")


def even(estimates: Estimates, last: Plan | None) -> Plan:
    """All at once: dealt to the kinds in turn, two to a device at most where there are too many."""
    slots = [pool.kind for pool in estimates.pools for _ in range(pool.count)]
    dealt: dict[int, list[Demand]] = {}
    waiting, reasons = {}, {}
    for demand in sorted(estimates.demands, key=lambda d: d.running_on is None):
        usable = [n for n, kind in enumerate(slots) if kind in demand.speeds and len(dealt.get(n, ())) < 2]
        stay = [n for n in usable if slots[n] == demand.running_on]
        if not usable:
            waiting[demand.job] = reasons[demand.job] = f"`{demand.job}` waits: every device has two jobs"
            continue
        slot = min(stay or usable, key=lambda n: (len(dealt.get(n, ())), n))
        dealt.setdefault(slot, []).append(demand)
        reasons[demand.job] = f"`{demand.job}` runs on {slots[slot]}: jobs are dealt in turn"
    placements = []
    for slot, own in sorted(dealt.items()):
        speeds = tuple(demand.speeds[slots[slot]] / len(own) for demand in own)
        placements.append(Placement(slots[slot], tuple(d.job for d in own), 1, speeds))
    return Plan(tuple(placements), waiting, reasons, objective="even")


def _alone(demand: Demand, kind: str) -> Placement:
    return Placement(kind, (demand.job,), demand.devices, (demand.speeds[kind],))
