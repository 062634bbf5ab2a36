"""Decide which job runs on which kind of device until the next decision.

`allocate` weighs every job on every kind (`worth`), adds the pairs that may
share a device (`pairing`), and takes the columns that are worth the most
together (`columns`, `decide`, `solve`). It never gives out more devices than there are, never
plans a device over its memory, and gives a reason for every job. Equal
arguments give equal plans, unless the time limit is reached: then the plan is
made greedily. The last plan stands where the new one is worth no more.
"""

import math
import time
from collections.abc import Sequence
from typing import get_args

import numpy as np

from shoestring.errors import FleetError
from shoestring.fleet.allocate import reasons
from shoestring.fleet.allocate.columns import Columns, Homes
from shoestring.fleet.allocate.decide import Market, decide
from shoestring.fleet.allocate.pairing import Floats, Ints, fits_alone, group, share
from shoestring.fleet.allocate.plan import Demand, Objective, Pairs, Placement, Plan, Pool, check_names
from shoestring.fleet.allocate.worth import Case, value

MEMORY_MARGIN = 0.1
TIME_LIMIT_S = 10.0

# A move pays back over the rounds that a job stays, not over the next one alone.
_STAY_ROUNDS = 4


def allocate(
    demands: Sequence[Demand],
    pools: Sequence[Pool],
    *,
    objective: Objective = "jct",
    pairs: Pairs | None = None,
    memory_margin: float = MEMORY_MARGIN,
    restart_cost_s: float = 0.0,
    round_s: float = 360.0,
    time_limit_s: float = TIME_LIMIT_S,
    last: Plan | None = None,
) -> Plan:
    """Return a plan for all `demands` on `pools`.

    Without `pairs` no two jobs share a device. `memory_margin` is the part of a
    device's memory that two jobs on it leave free. `restart_cost_s` is what a
    job loses when it starts or moves; `round_s` the time to the next decision.
    """
    start = time.monotonic()
    _check(objective, memory_margin, restart_cost_s, round_s)
    check_names(demands, pools)
    case = _case(demands, pools, pairs, memory_margin, round_s)
    valued = value(objective, case, start + time_limit_s)
    homes = _homes(demands, pools, last, restart_cost_s / (_STAY_ROUNDS * round_s))
    market = Market(homes.lessen(valued.worth), case.devices, case.counts, case.groups, case.shares, homes)
    choice, is_last = decide(market, _last_placements(case, last), start + time_limit_s)
    placements = tuple(_placement(case, choice.columns, at) for at in choice.chosen.tolist())
    sentences, waiting = reasons.explain(demands, pools, placements, objective)
    return Plan(
        placements,
        waiting,
        sentences,
        objective=objective,
        solver="kept" if is_last else "greedy" if choice.bound is None else "highs",
        score=choice.worth,
        bound=choice.bound,
        decision_s=time.monotonic() - start,
        end_s=valued.end_s,
    )


def _case(
    demands: Sequence[Demand], pools: Sequence[Pool], pairs: Pairs | None, margin: float, round_s: float
) -> Case:
    speeds = np.array(
        [
            [
                demand.speeds.get(pool.kind, 0.0)
                if demand.devices <= pool.count and fits_alone(demand, pool)
                else 0.0
                for pool in pools
            ]
            for demand in demands
        ],
        np.float64,
    ).reshape(len(demands), len(pools))
    steps = np.array([demand.remaining_steps for demand in demands], np.float64)
    groups = group(demands, pools)
    ranking = _rank(speeds, steps, groups.first)
    return Case(
        demands,
        pools,
        speeds,
        steps,
        np.array([demand.devices for demand in demands], np.int64),
        np.array([pool.count for pool in pools], np.int64),
        np.array([demand.weight for demand in demands], np.float64),
        groups,
        share(demands, pools, groups, pairs, margin, ranking),
        round_s,
    )


def _rank(speeds: Floats, steps: Floats, first: Ints) -> list[int]:
    """Order groups by the remaining time of their first job: `share` pairs groups near in this order."""
    best = speeds[first].max(axis=1, initial=0.0)
    time_left = np.where(best > 0, steps[first] / np.where(best > 0, best, 1.0), np.inf)
    return [int(g) for g in np.argsort(time_left, kind="stable")]


def _homes(demands: Sequence[Demand], pools: Sequence[Pool], last: Plan | None, loss: float) -> Homes:
    kinds = {pool.kind: k for k, pool in enumerate(pools)}
    index = {demand.job: at for at, demand in enumerate(demands)}
    mate = np.full(len(demands), -1, np.int64)
    for place in last.placements if last else ():
        if place.is_packed and all(job in index for job in place.jobs):
            a, b = (index[job] for job in place.jobs)
            mate[a], mate[b] = b, a
    home = [kinds.get(demand.running_on or "", -1) for demand in demands]
    return Homes(min(loss, 0.9), np.array(home, np.int64), mate)


def _last_placements(case: Case, last: Plan | None) -> list[tuple[int, ...]]:
    """List the last plan's placements of jobs that are not done: (kind, job), or (kind, job, job)."""
    kinds = {pool.kind: k for k, pool in enumerate(case.pools)}
    index = {demand.job: at for at, demand in enumerate(case.demands)}
    found = []
    for place in last.placements if last else ():
        jobs = [index[job] for job in place.jobs if job in index]
        if place.kind in kinds and jobs:
            found.append((kinds[place.kind], *jobs))
    return found


def _placement(case: Case, columns: Columns, at: int) -> Placement:
    k, a, b = int(columns.kind[at]), int(columns.a[at]), int(columns.b[at])
    jobs, speeds = [case.demands[a].job], [float(case.speeds[a, k] * columns.share_a[at])]
    if b >= 0:
        jobs.append(case.demands[b].job)
        speeds.append(float(case.speeds[b, k] * columns.share_b[at]))
    return Placement(case.pools[k].kind, tuple(jobs), int(columns.devices[at]), tuple(speeds))


def _check(objective: str, memory_margin: float, restart_cost_s: float, round_s: float) -> None:
    if objective not in get_args(Objective):
        raise FleetError(
            f"there is no objective `{objective}`", hint=f"one of {', '.join(get_args(Objective))}"
        )
    if not 0 <= memory_margin < 1:
        raise FleetError(f"the memory margin is {memory_margin}", hint="give 0 up to below 1")
    if not (math.isfinite(restart_cost_s) and restart_cost_s >= 0):
        raise FleetError(f"the restart cost is {restart_cost_s} s", hint="give 0 or more")
    if not (math.isfinite(round_s) and round_s > 0):
        raise FleetError(f"a round is {round_s} s", hint="give more than 0")
