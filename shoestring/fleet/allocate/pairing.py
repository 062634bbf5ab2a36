"""Which jobs could share a device, and what each keeps of its own speed then.

Jobs that behave alike form a group, so that the speeds of a pair are asked for
once for two groups and not once for two jobs. A pair is left out when it does
not fit the memory with the margin, and when sharing gains nothing: two shares
that add up to 1 or less are never better than one of the two jobs alone.

With many groups each meets only its next `PARTNERS` in the order of `ranking`,
so the work grows with the number of jobs and not with its square.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shoestring.fleet.allocate.plan import Demand, Pairs, Pool

PARTNERS = 10
ALL_PAIRS_UP_TO = 200

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Groups:
    """`of[j]` is the group of job j, `first[g]` a job that stands for group g."""

    of: Ints
    first: Ints

    def members(self, group: int) -> Ints:
        return np.flatnonzero(self.of == group)


@dataclass(frozen=True)
class Shares:
    """Row i: of groups `a[i]` and `b[i]` on kind `kind[i]`, each keeps this share of its speed alone."""

    a: Ints
    b: Ints
    kind: Ints
    share_a: Floats
    share_b: Floats

    def take(self, rows: Ints) -> "Shares":
        return Shares(self.a[rows], self.b[rows], self.kind[rows], self.share_a[rows], self.share_b[rows])


def group(demands: Sequence[Demand], pools: Sequence[Pool]) -> Groups:
    """Put jobs of equal work, devices, speeds and memory together."""
    numbers: dict[object, int] = {}
    of: list[int] = []
    first: list[int] = []
    for at, demand in enumerate(demands):
        memory = demand.memory_bytes or {}
        alike = (
            demand.kind_of_work,
            demand.devices,
            tuple(demand.speeds.get(pool.kind, 0.0) for pool in pools),
            tuple(memory.get(pool.kind) for pool in pools),
        )
        if alike not in numbers:
            numbers[alike] = len(first)
            first.append(at)
        of.append(numbers[alike])
    return Groups(np.array(of, np.int64), np.array(first, np.int64))


def share(
    demands: Sequence[Demand],
    pools: Sequence[Pool],
    groups: Groups,
    pairs: Pairs | None,
    margin: float,
    ranking: Sequence[int],
) -> Shares:
    """Ask `pairs` about the groups that may share; `ranking` lists the groups, the most wanted first."""
    rows: list[tuple[int, int, int, float, float]] = []
    if pairs is not None:
        sizes = np.bincount(groups.of, minlength=len(groups.first))
        for a, b in _meetings(ranking):
            one, other = demands[groups.first[a]], demands[groups.first[b]]
            if one.devices != other.devices or (a == b and sizes[a] < 2):
                continue
            for k, pool in enumerate(pools):
                alone = one.speeds.get(pool.kind, 0.0), other.speeds.get(pool.kind, 0.0)
                if min(alone) <= 0 or one.devices > pool.count or not fits(one, other, pool, margin):
                    continue
                both = pairs.together(one, other, pool.kind)
                if both is None:
                    continue
                shares = both[0] / alone[0], both[1] / alone[1]
                if min(shares) > 0 and sum(shares) > 1:
                    rows.append((a, b, k, *shares))
    table = np.array(rows, np.float64).reshape(-1, 5)
    whole = table[:, :3].astype(np.int64)
    return Shares(whole[:, 0], whole[:, 1], whole[:, 2], table[:, 3], table[:, 4])


def fits(one: Demand, other: Demand, pool: Pool, margin: float) -> bool:
    """Say whether two jobs fit one device's memory, with the part `margin` of it left free.

    A job whose memory is not known shares no device whose memory is.
    """
    if pool.memory_bytes is None:
        return True
    needs = [(demand.memory_bytes or {}).get(pool.kind) for demand in (one, other)]
    if needs[0] is None or needs[1] is None:
        return False
    return needs[0] + needs[1] <= (1 - margin) * pool.memory_bytes


def fits_alone(demand: Demand, pool: Pool) -> bool:
    """Say whether a job fits one device's memory; unknown memory is taken to fit."""
    need = (demand.memory_bytes or {}).get(pool.kind)
    return need is None or pool.memory_bytes is None or need <= pool.memory_bytes


def _meetings(ranking: Sequence[int]) -> list[tuple[int, int]]:
    reach = len(ranking) if len(ranking) <= ALL_PAIRS_UP_TO else PARTNERS
    return [(a, b) for place, a in enumerate(ranking) for b in ranking[place : place + reach + 1]]
