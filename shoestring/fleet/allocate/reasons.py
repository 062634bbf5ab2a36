"""One sentence a job: why it runs where it does, or what it waits for and about how long.

Sentences say what the plan itself shows (who has the devices, how much of its
speed a job keeps), so they are true of every plan, however it was found.
"""

import math
from collections.abc import Sequence

from shoestring.fleet.allocate.pairing import fits_alone
from shoestring.fleet.allocate.plan import Demand, Placement, Pool

_OTHERS = {
    "jct": "jobs that finish sooner or gain more there",
    "makespan": "jobs that the end depends on more",
    "fair": "jobs that had less of their share",
    "cost": "jobs that are cheaper there",
}


def explain(
    demands: Sequence[Demand], pools: Sequence[Pool], placements: Sequence[Placement], objective: str
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the sentence of every job, and those of the jobs that wait."""
    by_name = {demand.job: demand for demand in demands}
    used: dict[str, int] = {}
    for place in placements:
        used[place.kind] = used.get(place.kind, 0) + place.devices
    reasons: dict[str, str] = {}
    for place in placements:
        for job in place.jobs:
            reasons[job] = _placed(by_name[job], place, pools, used, objective)
    ends = {pool.kind: _ends(by_name, placements, pool.kind) for pool in pools}
    waiting: dict[str, str] = {}
    ahead: dict[str, int] = {}
    for demand in sorted(demands, key=_time_left_s):
        if demand.job not in reasons:
            waiting[demand.job] = _waits(demand, pools, used, ends, ahead, objective)
    waiting = {demand.job: waiting[demand.job] for demand in demands if demand.job in waiting}
    both = {**reasons, **waiting}
    return {demand.job: both[demand.job] for demand in demands}, waiting


def usable(demand: Demand, pools: Sequence[Pool]) -> list[Pool]:
    """List the pools that a job could run on if they were empty, the fastest first."""
    able = [
        pool
        for pool in pools
        if demand.speeds.get(pool.kind, 0.0) > 0 and pool.count >= demand.devices and fits_alone(demand, pool)
    ]
    return sorted(able, key=lambda pool: -demand.speeds[pool.kind])


def _placed(
    demand: Demand, place: Placement, pools: Sequence[Pool], used: dict[str, int], objective: str
) -> str:
    device = place.kind if place.devices == 1 else f"{place.devices} {place.kind}"
    alone = demand.speeds[place.kind]
    if place.is_packed:
        at = place.jobs.index(demand.job)
        kept = [f"{speed:.3g}" for speed in (place.speeds[at], alone)]
        text = f"shares {device} with `{place.jobs[1 - at]}`: {kept[0]} of its {kept[1]} steps/s alone"
    else:
        fastest = usable(demand, pools)[0]
        text = f"runs on {device}"
        if alone >= demand.speeds[fastest.kind]:
            text += ": no kind is faster for it"
        elif used.get(fastest.kind, 0) + demand.devices > fastest.count:
            text += f": {_whole([fastest], ', where it is faster,')} with {_OTHERS[objective]}"
        elif demand.running_on == place.kind:
            text += f": it is there already, and moving to {fastest.kind} would cost more than it gains"
        else:
            text += f": it does more good there than on {fastest.kind}"
    return f"`{demand.job}` {text}"


def _waits(
    demand: Demand,
    pools: Sequence[Pool],
    used: dict[str, int],
    ends: dict[str, list[float]],
    ahead: dict[str, int],
    objective: str,
) -> str:
    able = usable(demand, pools)
    if not able:
        return f"`{demand.job}` waits: {_obstacle(demand, pools)}"
    free = [pool for pool in able if used.get(pool.kind, 0) + demand.devices <= pool.count]
    if free:
        return f"`{demand.job}` waits: the free {free[0].kind} cost too much for what it does there"
    first = able[0]
    place = ahead.get(first.kind, 0)
    ahead[first.kind] = place + demand.devices
    due = ends[first.kind]
    about = f"; about {due[min(place + demand.devices, len(due)) - 1]:,.0f} s" if due else ""
    return f"`{demand.job}` waits: {_whole(able[:2])} with {_OTHERS[objective]}{about}"


def _whole(pools: Sequence[Pool], aside: str = "") -> str:
    if sum(pool.count for pool in pools) == 1:
        return f"the only {pools[0].kind}{aside} is"
    return f"all {' and '.join(f'{pool.count} {pool.kind}' for pool in pools)}{aside} are"


def _obstacle(demand: Demand, pools: Sequence[Pool]) -> str:
    known = [pool for pool in pools if demand.speeds.get(pool.kind, 0.0) > 0]
    if not known:
        return f"its speed is not known on any device here; run `shoestring fleet profile {demand.job}`"
    large = [pool for pool in known if fits_alone(demand, pool)]
    if not large:
        gib = [(demand.memory_bytes or {}).get(pool.kind, 0) / 2**30 for pool in known]
        most = max((pool.memory_bytes or 0) / 2**30 for pool in known)
        return f"it needs {min(gib):.1f} GiB on a device, and the largest it could use has {most:.1f} GiB"
    most_devices = max(pool.count for pool in large)
    return f"it needs {demand.devices} devices of one kind at once, and it could use {most_devices} at most"


def _time_left_s(demand: Demand) -> float:
    best = max(demand.speeds.values(), default=0.0)
    return demand.remaining_steps / best if best > 0 else math.inf


def _ends(by_name: dict[str, Demand], placements: Sequence[Placement], kind: str) -> list[float]:
    """When devices of a kind fall free, if every job stays where it is."""
    ends = []
    for place in placements:
        if place.kind == kind:
            last = max(
                by_name[job].remaining_steps / speed
                for job, speed in zip(place.jobs, place.speeds, strict=True)
            )
            ends += [last] * place.devices
    return sorted(ends)
