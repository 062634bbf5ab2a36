"""The earliest end of all jobs, if the time of devices could be divided among jobs in any parts.

A linear program: the time of every job on every kind, alone and in pairs, so
that each job's steps are made, no kind works longer than the end times its
devices, and no job runs longer than until the end. Its optimum is a bound: no
schedule ends sooner. Its duals are prices: what a step of each job is worth for
ending sooner.

Small jobs of one group are taken as one with their steps added up, which keeps
the program small. A job that needs much of the whole time stays by itself, as
only then does the program see that it cannot run beside itself.
"""

import math
import time
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import csr_array

from shoestring.errors import FleetError
from shoestring.fleet.allocate.pairing import Floats, Groups, Ints, Shares

_LONG = 0.3
_MANY = 40


@dataclass(frozen=True)
class Fluid:
    """The bound on the end, and for each job what one step is worth, as a part of a second's progress."""

    end_s: float
    price: Floats


def shortest_end(
    speeds: Floats,
    steps: Floats,
    devices: Ints,
    counts: Ints,
    groups: Groups,
    shares: Shares,
    *,
    slack: float = 0.0,
    until: float = math.inf,
) -> Fluid | None:
    """Solve the program for the jobs that can run at all; None if `until` on the monotonic clock comes first.

    With `slack` a job may run only that much less of the time, so that one that
    has little time to lose is dear before it has none; the end is then no bound.
    """
    price = np.zeros(len(steps))
    able = np.flatnonzero(((speeds > 0) & (devices[:, None] <= counts)).any(axis=1))
    if len(able) == 0:
        return Fluid(0.0, price)
    of, first = _bundle(speeds[able], steps[able], devices[able], counts, groups.of[able])
    size = len(first)
    lot = able[first]
    work = np.bincount(of, steps[able], minlength=size)
    members = np.bincount(of, minlength=size)
    a, b, kind, rate_a, rate_b = _columns(speeds[lot], devices[lot], counts, groups.of[lot], members, shares)
    at, pair = np.arange(len(a)), b >= 0
    # Rows: each bundle's work (scaled to 1), each kind's devices, each bundle's own time.
    rows = [a, b[pair], size + kind, size + len(counts) + a, size + len(counts) + b[pair]]
    data = [-rate_a / work[a], -rate_b[pair] / work[b[pair]], devices[lot][a], np.ones(len(a) + pair.sum())]
    end = -np.concatenate([np.zeros(size), counts, members * (1 - slack)])
    tail = np.arange(len(end))
    matrix = csr_array(
        (
            np.concatenate([*data, end]),
            (
                np.concatenate([*rows, tail]),
                np.concatenate([at, at[pair], at, at, at[pair], np.full(len(end), len(a))]),
            ),
        )
    )
    left_s = until - time.monotonic()
    if left_s <= 0:
        return None
    found = linprog(
        np.concatenate([np.zeros(len(a)), [1.0]]),
        A_ub=matrix,
        b_ub=np.concatenate([-np.ones(size), np.zeros(len(end) - size)]),
        method="highs",
        options={"time_limit": left_s},
    )
    if found.status == 1:
        return None
    if found.status != 0:
        raise FleetError(f"the makespan program failed: {found.message}", hint="plan with another objective")
    price[able] = (np.maximum(0.0, -found.ineqlin.marginals[:size]) / work)[of]
    return Fluid(float(found.fun), price)


def _bundle(speeds: Floats, steps: Floats, devices: Ints, counts: Ints, group: Ints) -> tuple[Ints, Ints]:
    time_left = steps / speeds.max(axis=1)
    guess = max(float(time_left.max()), float((time_left * devices).sum() / counts.sum()))
    is_long = time_left > _LONG * guess
    if is_long.sum() > _MANY:  # the longest by themselves, to bound the size of the program
        is_long = time_left > np.sort(time_left)[-_MANY]
    label = np.where(is_long, -1 - np.arange(len(steps)), group)
    _, first, of = np.unique(label, return_index=True, return_inverse=True)
    return of.astype(np.int64), first.astype(np.int64)


def _columns(
    speeds: Floats, devices: Ints, counts: Ints, group: Ints, members: Ints, shares: Shares
) -> tuple[Ints, Ints, Ints, Floats, Floats]:
    a, kind = np.nonzero((speeds > 0) & (devices[:, None] <= counts))
    parts = [(a, np.full(len(a), -1), kind, speeds[a, kind], np.zeros(len(a)))]
    of_group = {g: np.flatnonzero(group == g) for g in np.unique(group).tolist()}
    for row in range(len(shares.a)):
        one, other = (of_group.get(int(g)) for g in (shares.a[row], shares.b[row]))
        if one is None or other is None:
            continue
        first, second = np.repeat(one, len(other)), np.tile(other, len(one))
        if shares.a[row] == shares.b[row]:
            keep = (first < second) | ((first == second) & (members[first] > 1))
            first, second = first[keep], second[keep]
        k = int(shares.kind[row])
        rates = speeds[first, k] * shares.share_a[row], speeds[second, k] * shares.share_b[row]
        parts.append((first, second, np.full(len(first), k), *rates))
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
    return columns[0], columns[1], columns[2], columns[3], columns[4]
