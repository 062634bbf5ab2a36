"""Choose the columns of a plan: find prices, choose whole columns, and do so in parts for large fleets.

The relaxed problem is solved over the columns that are near the present prices,
and solved again as the prices change, until its worth is within `_CLOSE` of the
bound, or `_PRICINGS` times. The prices bound the columns that were left out, too:
claims that are raised to the best column of every job bound every choice.

A large fleet is dealt into parts with a similar mix of jobs and a share of the
devices each, as the time to solve grows faster than the number of jobs. Parts
lose little worth. The bound is that of the whole fleet: it is computed from the
claims of all parts and the mean of their rents.
"""

import math
from dataclasses import dataclass

import numpy as np

from shoestring.fleet.allocate import solve
from shoestring.fleet.allocate.columns import Columns, Homes, PairColumns, singles
from shoestring.fleet.allocate.pairing import Floats, Groups, Ints, Shares

PART_JOBS = 2000
_PART_SIZE = 1000
_PARTNERS = 10
_PRICINGS = 5
_CLOSE = 3e-3
_STUCK = 2e-3
_PASSES = 8
_ALL_COLUMNS = 64
# A column that is this much below its prices, as a part of its worth, is left out for now.
_BELOW = 0.2


@dataclass(frozen=True)
class Market:
    """The numbers of a decision: `worth[j, k]`, `devices[j]` that a job needs, `counts[k]` of a kind."""

    worth: Floats
    devices: Ints
    counts: Ints
    groups: Groups
    shares: Shares
    homes: Homes


@dataclass(frozen=True)
class Choice:
    """Columns, those of them that are chosen, and the bound; None where the time ran out."""

    columns: Columns
    chosen: Ints
    bound: float | None = None

    @property
    def worth(self) -> float:
        return float(self.columns.worth[self.chosen].sum())


def decide(market: Market, old: list[tuple[int, ...]], until: float) -> tuple[Choice, bool]:
    """Choose columns; say too whether they are the last plan's, `old`: (kind, job) or (kind, job, job)."""
    pairs = _pairs(market)
    own = singles(market.worth, market.devices, market.counts)
    is_large = len(market.devices) > PART_JOBS
    choice = _decide_parts(market, own, pairs, until) if is_large else _decide(market, own, pairs, until)[0]
    again = _repeat_last(market, own, pairs, old, choice)
    if again is not None and again.worth >= choice.worth * (1 - 1e-9):
        return again, True
    return choice, False


def _decide(
    market: Market, own: Columns, pairs: PairColumns, until: float, wants_bound: bool = True
) -> tuple[Choice, solve.Relaxed | None]:
    jobs, counts = len(market.devices), market.counts
    is_small = len(own) + pairs.size <= _ALL_COLUMNS
    columns = own.join(pairs.listed()) if is_small else own
    active, bound, before = np.arange(len(columns)), math.inf, 0.0
    for turn in range(_PRICINGS):
        found = solve.relax(columns.take(active), jobs, counts, until)
        if found is None:
            free = np.zeros(jobs), np.zeros(len(counts))
            columns = columns.join(pairs.paying(*free, _PARTNERS))
            return Choice(columns, solve.choose_greedily(columns, jobs, counts)), None
        relaxed = found.spread(active, len(columns))
        if wants_bound and turn > 0:  # the first prices know no pairs: their bound is worth nothing
            bound = min(bound, _bound(own, pairs, relaxed, counts))
        is_close = bound <= relaxed.worth * (1 + _CLOSE)
        is_stuck = not wants_bound and turn > 0 and relaxed.worth <= before * (1 + _STUCK)
        if is_small or is_close or is_stuck or turn == _PRICINGS - 1:
            break
        before = relaxed.worth
        new = pairs.paying(relaxed.claim, relaxed.rent, _PARTNERS)
        columns = columns.join(new)
        near = np.flatnonzero(columns.gain(relaxed.claim, relaxed.rent) > -_BELOW * columns.worth)
        if len(new) == 0 and np.isin(near, active).all():
            break
        active = near
    if wants_bound and bound == math.inf:
        bound = _bound(own, pairs, relaxed, counts)
    return Choice(columns, solve.settle(columns, relaxed, jobs, counts, until), bound), relaxed


def _decide_parts(market: Market, own: Columns, pairs: PairColumns, until: float) -> Choice:
    jobs, kinds = len(market.devices), len(market.counts)
    parts = _count_parts(market)
    dealt = _deal(market, parts)
    columns, chosen = own, np.zeros(0, np.int64)
    claim, rents = np.zeros(jobs), []
    for number in range(parts):
        members = np.flatnonzero(dealt == number)
        # Each part gets its share of every kind; the remaining devices go to the parts in turn.
        counts = (market.counts + (number + np.arange(kinds)) % parts) // parts
        part = _cut(market, members, counts)
        alone = singles(part.worth, part.devices, counts)
        choice, relaxed = _decide(part, alone, _pairs(part), until, wants_bound=False)
        chosen = np.concatenate([chosen, len(columns) + choice.chosen])
        columns = columns.join(choice.columns.renamed(members))
        if relaxed is not None:
            claim[members] = relaxed.claim
            rents.append(relaxed.rent)
    chosen = solve.fill(columns, chosen, jobs, market.counts)
    if len(rents) < parts:
        return Choice(columns, chosen)
    prices = solve.Relaxed(np.zeros(0), 0.0, claim, np.mean(rents, axis=0))
    return Choice(columns, chosen, _bound(own, pairs, prices, market.counts))


def _count_parts(market: Market) -> int:
    """Count parts of about `_PART_SIZE` jobs, but none so small that a kind cannot seat its largest jobs."""
    parts = max(1, round(len(market.devices) / _PART_SIZE))
    for kind, count in enumerate(market.counts.tolist()):
        asked = int(market.devices[market.worth[:, kind] > 0].max(initial=0))
        if asked:
            parts = min(parts, max(1, count // (4 * asked)))
    return parts


def _deal(market: Market, parts: int) -> Ints:
    """Deal jobs of one group and near worth to different parts, and jobs that share to the same one."""
    order = np.lexsort((-market.worth.max(axis=1), market.groups.of))
    dealt = np.full(len(order), -1, np.int64)
    mate = market.homes.mate
    turn = 0
    for job in order.tolist():
        if mate[job] >= 0 and dealt[mate[job]] >= 0:
            dealt[job] = dealt[mate[job]]
        else:
            dealt[job] = turn % parts
            turn += 1
    return dealt


def _cut(market: Market, members: Ints, counts: Ints) -> Market:
    new = np.full(len(market.devices) + 1, -1, np.int64)
    new[members] = np.arange(len(members))
    homes = Homes(market.homes.loss, market.homes.kind[members], new[market.homes.mate[members]])
    groups = Groups(market.groups.of[members], market.groups.first)
    return Market(market.worth[members], market.devices[members], counts, groups, market.shares, homes)


def _repeat_last(
    market: Market, own: Columns, pairs: PairColumns, old: list[tuple[int, ...]], choice: Choice
) -> Choice | None:
    """Choose the columns of the last plan that still fit, and fill up with those of `choice`."""
    if not old:
        return None
    jobs, counts = len(market.devices), market.counts
    alone = {place for place in old if len(place) == 2}
    stays = [place in alone for place in zip(own.kind.tolist(), own.a.tolist(), strict=True)]
    again = own.take(np.flatnonzero(stays)).join(pairs.between([p for p in old if len(p) == 3]))
    columns = again.join(choice.columns)
    first = solve.choose_greedily(again, jobs, counts)
    return Choice(columns, solve.fill(columns, first, jobs, counts), choice.bound)


def _bound(own: Columns, pairs: PairColumns, relaxed: solve.Relaxed, counts: Ints) -> float:
    """Bound the worth of every choice, by prices that no column exceeds.

    Starts from the prices of the relaxed problem; `own` are all columns of one job.
    The rents stay. A job's claim goes up by half of what its best pair exceeds its
    prices by, or down by half of what that pair stays below: half, as the other job
    of the pair takes the same step.
    """
    claim, rent = relaxed.claim, relaxed.rent
    least = np.zeros(len(claim))
    np.maximum.at(least, own.a, own.worth - rent[own.kind] * own.devices)
    claim = np.maximum(claim, least)
    bound = math.inf
    for _ in range(_PASSES):
        best = pairs.best_gain(claim, rent)
        enough = float((claim + np.maximum(best, 0.0) / 2).sum() + rent @ counts)
        if enough >= bound * (1 - 1e-5):
            return min(bound, enough)
        bound = enough
        claim = np.maximum(claim + best / 2, least)
    return bound


def _pairs(market: Market) -> PairColumns:
    return PairColumns(market.worth, market.devices, market.groups, market.shares, market.homes)
