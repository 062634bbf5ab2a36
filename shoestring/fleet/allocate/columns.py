"""The choices a plan is made of: one job on a kind, or two that share.

A column is one such choice and its worth. All columns of one job are listed;
of the pairs, which are many, only those that pay at the present prices. The
prices are the duals of the relaxed problem: `rent[k]` for one device of kind
k, `claim[j]` for job j. A pair that is worth more than its two claims and its
rent would improve the relaxed problem; when no such pair is left, the optimum
over the listed columns is the optimum over all columns.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shoestring.fleet.allocate.pairing import Floats, Groups, Ints, Shares

EXPAND_UP_TO = 200_000


@dataclass(frozen=True)
class Homes:
    """The kind that each job runs on now, and the part of its worth that it loses by starting elsewhere.

    `kind[j]` is -1 for a job that does not run; `mate[j]` is the job it shares with, or -1.
    """

    loss: float
    kind: Ints
    mate: Ints

    def lessen(self, worth: Floats) -> Floats:
        """Return `worth` with the loss taken off every kind that a job does not run on now."""
        away = self.kind[:, None] != np.arange(worth.shape[1])
        return np.where(away, worth * (1 - self.loss), worth)


@dataclass(frozen=True)
class Columns:
    """Parallel arrays; `b` is -1 where job `a` is alone. `worth` is what the column adds to the score."""

    kind: Ints
    a: Ints
    b: Ints
    devices: Ints
    share_a: Floats
    share_b: Floats
    worth: Floats

    def __len__(self) -> int:
        return len(self.kind)

    def take(self, which: Ints) -> "Columns":
        return Columns(*(getattr(self, name)[which] for name in _FIELDS))

    def gain(self, claim: Floats, rent: Floats) -> Floats:
        """Return how much each column is worth above its prices."""
        second = np.where(self.b >= 0, claim[self.b], 0.0)
        return self.worth - claim[self.a] - second - rent[self.kind] * self.devices

    def renamed(self, jobs: Ints) -> "Columns":
        """Return the same columns for job `jobs[j]` in place of j."""
        b = np.where(self.b >= 0, jobs[self.b], -1)
        return Columns(self.kind, jobs[self.a], b, self.devices, self.share_a, self.share_b, self.worth)

    def join(self, other: "Columns") -> "Columns":
        return Columns(*(np.concatenate([getattr(self, name), getattr(other, name)]) for name in _FIELDS))


_FIELDS = tuple(Columns.__dataclass_fields__)


def singles(worth: Floats, devices: Ints, counts: Ints) -> Columns:
    """List every job on every kind where `worth[j, k]` is above 0 and the kind has the devices."""
    job, kind = np.nonzero((worth > 0) & (devices[:, None] <= counts[None, :]))
    ones = np.ones(len(job))
    none = np.full(len(job), -1, np.int64)
    return Columns(kind, job, none, devices[job], ones, np.zeros(len(job)), worth[job, kind])


class PairColumns:
    """All pairs of jobs that may share: listed where they are few, matched by rank where they are many."""

    def __init__(self, worth: Floats, devices: Ints, groups: Groups, shares: Shares, homes: Homes) -> None:
        members = np.argsort(groups.of, kind="stable")
        sizes = np.bincount(groups.of, minlength=len(groups.first))
        there = (sizes[shares.a] > 0) & (sizes[shares.b] > np.where(shares.a == shares.b, 1, 0))
        shares = shares.take(np.flatnonzero(there))
        self._worth = worth
        self._devices = devices
        self._shares = shares
        self._homes = homes
        self._groups = groups
        self.size = int((sizes[shares.a] * sizes[shares.b]).sum())
        self._left = _Side(members, sizes, shares.a)
        self._right = _Side(members, sizes, shares.b)
        self._all = None
        if self.size <= EXPAND_UP_TO:
            self._all = self.listed()

    def paying(self, claim: Floats, rent: Floats, per_job: int) -> Columns:
        """Return pairs worth more than their prices, at most about `per_job` a job."""
        columns = self._match(claim) if self._all is None else self._all
        gain = columns.gain(claim, rent)
        order = np.flatnonzero(gain > 1e-9 * columns.worth)
        order = order[np.argsort(-gain[order], kind="stable")]
        return columns.take(_cap(columns, order, per_job, len(claim)))

    def best_gain(self, claim: Floats, rent: Floats) -> Floats:
        """Return, by job, how much the best of all its pairs is above its prices; -inf without a pair."""
        best = np.full(len(claim), -np.inf)
        if self._all is not None:
            gain = self._all.gain(claim, rent)
            np.maximum.at(best, self._all.a, gain)
            np.maximum.at(best, self._all.b, gain)
            return best
        s = self._shares
        if len(s.a) == 0:
            return best
        left, right = self._gains(self._left, s.share_a, claim), self._gains(self._right, s.share_b, claim)
        cost = rent[s.kind] * self._devices[self._left.job[self._left.start]]
        for side, gain, other, other_gain in (
            (self._left, left, self._right, right),
            (self._right, right, self._left, left),
        ):
            mate, second = other.tops(other_gain)
            mate = mate[side.row]
            # A job is no partner of itself: where a row pairs a group with itself, the job's own gain is
            # left out. Both sides list the jobs of that group in the same order.
            own = np.flatnonzero((s.a == s.b)[side.row])
            at = other.start[side.row[own]] + own - side.start[side.row[own]]
            mate[own] = np.where(other_gain[at] == mate[own], second[side.row[own]], mate[own])
            np.maximum.at(best, side.job, gain + mate - cost[side.row])
        return best

    def between(self, places: Sequence[tuple[int, ...]]) -> Columns:
        """Return the columns of pairs, given as a kind and two jobs, as far as they may share."""
        s = self._shares
        row_of = {
            key: row for row, key in enumerate(zip(s.a.tolist(), s.b.tolist(), s.kind.tolist(), strict=True))
        }
        found = []
        for kind, a, b in places:
            ga, gb = int(self._groups.of[a]), int(self._groups.of[b])
            if (ga, gb, kind) in row_of:
                found.append((row_of[ga, gb, kind], a, b))
            elif (gb, ga, kind) in row_of:
                found.append((row_of[gb, ga, kind], b, a))
        table = np.array(found, np.int64).reshape(-1, 3)
        return self._columns(table[:, 0], table[:, 1], table[:, 2])

    def listed(self) -> Columns:
        """List every pair; there are at most `size`, which counts pairs within a group twice."""
        left, right = self._left, self._right
        lengths = right.sizes[left.row]  # each job of the left meets all of the right
        row = np.repeat(left.row, lengths)
        one = np.repeat(left.job, lengths)
        place = np.arange(len(row)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        other = right.job[right.start[row] + place]
        keep = (self._shares.a[row] != self._shares.b[row]) | (one < other)
        return self._columns(row[keep], one[keep], other[keep])

    def _match(self, claim: Floats) -> Columns:
        """Pair the i-th best of one group with the i-th best of the other."""
        s = self._shares
        left = self._left.sort(self._gains(self._left, s.share_a, claim))
        right = self._right.sort(self._gains(self._right, s.share_b, claim))
        is_same = s.a == s.b
        step = np.where(is_same, 2, 1)
        pairs = np.minimum(self._left.sizes // step, self._right.sizes)
        row = np.repeat(np.arange(len(pairs)), pairs)
        place = np.arange(len(row)) - np.repeat(np.cumsum(pairs) - pairs, pairs)
        one = left[self._left.start[row] + place * step[row]]
        other = right[self._right.start[row] + place * step[row] + is_same[row]]
        return self._columns(row, one, other)

    def _gains(self, side: "_Side", share: Floats, claim: Floats) -> Floats:
        return self._worth[side.job, self._shares.kind[side.row]] * share[side.row] - claim[side.job]

    def _columns(self, row: Ints, one: Ints, other: Ints) -> Columns:
        s, home = self._shares, self._homes.kind
        kind = s.kind[row]
        worth_a, worth_b = self._worth[one, kind] * s.share_a[row], self._worth[other, kind] * s.share_b[row]
        # Of two jobs at home on devices of their own, one has to move to the other's.
        apart = (home[one] == kind) & (home[other] == kind) & (self._homes.mate[one] != other)
        worth = worth_a + worth_b - np.where(apart, self._homes.loss * np.minimum(worth_a, worth_b), 0.0)
        found = Columns(kind, one, other, self._devices[one], s.share_a[row], s.share_b[row], worth)
        return found.take(np.flatnonzero(np.minimum(worth_a, worth_b) > 0))


class _Side:
    """One side of every row of shares, laid out flat: `job[start[r] :][: sizes[r]]` are the jobs of row r."""

    def __init__(self, members: Ints, group_sizes: Ints, group: Ints) -> None:
        first = np.cumsum(group_sizes) - group_sizes
        self.sizes = group_sizes[group]
        self.start = np.cumsum(self.sizes) - self.sizes
        self.row = np.repeat(np.arange(len(group)), self.sizes)
        self.job = members[first[group][self.row] + np.arange(len(self.row)) - self.start[self.row]]

    def sort(self, gain: Floats) -> Ints:
        """Return the jobs, those with the highest gain of each row first."""
        return self.job[np.lexsort((-gain, self.row))]

    def tops(self, gain: Floats) -> tuple[Floats, Floats]:
        """Return the highest gain of each row, and the second highest; they are equal in a tie."""
        first = np.maximum.reduceat(gain, self.start)
        is_first = gain == first[self.row]
        second = np.maximum.reduceat(np.where(is_first, -np.inf, gain), self.start)
        return first, np.where(np.add.reduceat(is_first, self.start, dtype=np.int64) > 1, first, second)


def _cap(columns: Columns, order: Ints, per_job: int, jobs: int) -> Ints:
    """Choose columns in this order; a column counts while one of its jobs is in fewer than `per_job`."""
    seen = np.zeros(jobs, np.int64).tolist()
    kept = []
    for at, a, b in zip(order.tolist(), columns.a[order].tolist(), columns.b[order].tolist(), strict=True):
        if min(seen[a], seen[b]) < per_job:
            seen[a] += 1
            seen[b] += 1
            kept.append(at)
    return np.array(kept, np.int64)
