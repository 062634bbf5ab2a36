"""Choose columns: the relaxed problem by HiGHS, whole numbers from it, and a greedy choice without it.

The problem: take columns so that their worth adds up to the most, no job is in
two of them and no kind gives more devices than it has. `relax` drops the whole
numbers and yields a bound and prices; `settle` finds a whole choice by branch
and bound. Small problems are solved to the end. In large ones the columns that
are whole in the relaxed solution are chosen, and the search is over the others,
until it is within a thousandth of the bound or has tried `_TRIES` times: tries
and not seconds, so that equal problems have equal answers on every machine.
"""

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import csr_array

from shoestring.fleet.allocate.columns import Columns
from shoestring.fleet.allocate.pairing import Floats, Ints

_SMALL = 64
_SMALL_TRIES, _TRIES = 100, 16
_NEAR = 600
_ROOM = 3
_ENOUGH = 1e-3
_WHOLE = 1 - 1e-6


@dataclass(frozen=True)
class Relaxed:
    """A relaxed solution: the part of each column that is taken, its worth, and the prices that prove it."""

    taken: Floats
    worth: float
    claim: Floats
    rent: Floats

    def spread(self, at: Ints, size: int) -> "Relaxed":
        """Return the same solution among `size` columns, of which it was solved over those `at`."""
        taken = np.zeros(size)
        taken[at] = self.taken
        return Relaxed(taken, self.worth, self.claim, self.rent)


def relax(columns: Columns, jobs: int, counts: Ints, until: float) -> Relaxed | None:
    """Solve without whole numbers; None if `until` on the monotonic clock comes first."""
    left = until - time.monotonic()
    if left <= 0:
        return None
    if len(columns) == 0:
        return Relaxed(np.zeros(0), 0.0, np.zeros(jobs), np.zeros(len(counts)))
    # HiGHS compares with absolute tolerances, so worth is brought to about 1 first.
    unit = float(np.median(columns.worth))
    found = linprog(
        -columns.worth / unit,
        A_ub=_matrix(columns, jobs, len(counts)),
        b_ub=np.concatenate([np.ones(jobs), counts.astype(np.float64)]),
        method="highs",
        options={"time_limit": left},
    )
    if found.status != 0:
        return None
    prices = np.maximum(0.0, -found.ineqlin.marginals) * unit
    return Relaxed(found.x, float(columns.worth @ found.x), prices[:jobs], prices[jobs:])


def settle(columns: Columns, relaxed: Relaxed, jobs: int, counts: Ints, until: float) -> Ints:
    """Choose whole columns, the best or near the best; greedily from where the time ends."""
    is_small = len(columns) <= _SMALL
    room = Room(jobs, counts)
    fixed = [] if is_small else _standing(columns, relaxed)
    for at in fixed:
        room.take(columns, at)
    open_ = np.flatnonzero(room.has(columns))
    # Columns far below their prices are in no good choice; how far is seen against what they are worth.
    gain = columns.gain(relaxed.claim, relaxed.rent) / columns.worth
    near = np.sort(open_[np.argsort(-gain[open_], kind="stable")][: len(open_) if is_small else _NEAR])
    search = _Search(columns.take(near), room, until, 1e-9 if is_small else _ENOUGH)
    search.run(_SMALL_TRIES if is_small else _TRIES)
    chosen = np.sort(np.concatenate([np.array(fixed, np.int64), near[search.chosen]]))
    return fill(columns, chosen, jobs, counts)


def _standing(columns: Columns, relaxed: Relaxed) -> list[int]:
    """List the whole columns of the relaxed solution that are chosen without a search.

    On a kind with split columns, the whole columns of least worth a device are
    searched again, as a split column may need their devices: as many columns as
    give `_ROOM` times the devices of the largest split column.
    """
    stands = relaxed.taken >= _WHOLE
    is_split = (relaxed.taken > 1 - _WHOLE) & ~stands
    density = columns.worth / columns.devices
    for kind in np.unique(columns.kind[is_split]).tolist():
        need = _ROOM * int(columns.devices[is_split & (columns.kind == kind)].max())
        own = np.flatnonzero(stands & (columns.kind == kind))
        own = own[np.argsort(density[own], kind="stable")]
        before = np.cumsum(columns.devices[own]) - columns.devices[own]
        stands[own[before < need]] = False
    return [int(at) for at in np.flatnonzero(stands)]


def choose_greedily(columns: Columns, jobs: int, counts: Ints) -> Ints:
    """Take the column of most worth a device that still fits, again and again."""
    return fill(columns, np.zeros(0, np.int64), jobs, counts)


def fill(columns: Columns, chosen: Ints, jobs: int, counts: Ints) -> Ints:
    """Add columns that still fit to a choice, greedily."""
    room = Room(jobs, counts)
    for at in chosen.tolist():
        room.take(columns, at)
    added = []
    open_ = np.flatnonzero(room.has(columns))
    density = columns.worth[open_] / columns.devices[open_]
    for at in open_[np.argsort(-density, kind="stable")].tolist():
        if room.fits(columns, at):
            room.take(columns, at)
            added.append(at)
    return np.sort(np.concatenate([chosen, np.array(added, np.int64)]))


class Room:
    """The devices left, and the jobs not placed yet."""

    def __init__(self, jobs: int, counts: Ints) -> None:
        self.left = counts.copy()
        self.is_free = np.ones(jobs + 1, bool)  # the last stands for "no second job", which is index -1

    def has(self, columns: Columns) -> NDArray[np.bool_]:
        """Say for each column whether it could be taken now."""
        fits = self.is_free[columns.a] & self.is_free[columns.b]
        return fits & (columns.devices <= self.left[columns.kind]) & (columns.worth > 0)

    def fits(self, columns: Columns, at: int) -> bool:
        free = self.is_free[columns.a[at]] and self.is_free[columns.b[at]]
        return bool(free and columns.devices[at] <= self.left[columns.kind[at]])

    def take(self, columns: Columns, at: int) -> None:
        self.left[columns.kind[at]] -= columns.devices[at]
        self.is_free[columns.a[at]] = False
        if columns.b[at] >= 0:
            self.is_free[columns.b[at]] = False

    def copy(self) -> "Room":
        twin = Room.__new__(Room)
        twin.left, twin.is_free = self.left.copy(), self.is_free.copy()
        return twin


class _Search:
    """Depth-first branch and bound; the branch that takes the column comes first."""

    def __init__(self, columns: Columns, room: Room, until: float, enough: float) -> None:
        self._columns = columns
        self._jobs = len(room.is_free) - 1
        self._root = room
        self._until = until
        self._enough = enough
        greedy = choose_greedily(columns.take(np.flatnonzero(room.has(columns))), self._jobs, room.left)
        self.chosen = np.flatnonzero(room.has(columns))[greedy]
        self._best = float(columns.worth[self.chosen].sum())

    def run(self, tries: int) -> None:
        everything = np.arange(len(self._columns))
        stack: list[tuple[Room, list[int], Ints]] = [(self._root, [], everything)]
        while stack and tries > 0:
            room, taken, allowed = stack.pop()
            tries -= 1
            allowed = allowed[room.has(self._columns.take(allowed))]
            part = self._columns.take(allowed)
            relaxed = self._relax(part, room)
            if relaxed is None:
                return
            have = float(self._columns.worth[taken].sum())
            if have + relaxed.worth <= self._best * (1 + self._enough):
                continue
            whole = allowed[relaxed.taken >= _WHOLE].tolist()
            split = np.flatnonzero((relaxed.taken > 1 - _WHOLE) & (relaxed.taken < _WHOLE))
            if len(split) == 0:
                self._note_best(taken + whole, have + relaxed.worth)
                continue
            rounded = fill(part, np.flatnonzero(relaxed.taken >= _WHOLE), self._jobs, room.left)
            self._note_best(taken + allowed[rounded].tolist(), have + float(part.worth[rounded].sum()))
            pick = int(allowed[split[np.argmax(relaxed.taken[split])]])
            without = allowed[allowed != pick]
            inside = room.copy()
            inside.take(self._columns, pick)
            stack += [(room, taken, without), (inside, [*taken, pick], without)]

    def _relax(self, part: Columns, room: Room) -> Relaxed | None:
        """Relax over the jobs of these columns only: most other jobs are in a chosen column already."""
        used, names = np.unique(np.concatenate([part.a, part.b[part.b >= 0]]), return_inverse=True)
        a, b = names[: len(part)], np.full(len(part), -1)
        b[part.b >= 0] = names[len(part) :]
        small = Columns(part.kind, a, b, part.devices, part.share_a, part.share_b, part.worth)
        return relax(small, len(used), room.left, self._until)

    def _note_best(self, chosen: list[int], worth: float) -> None:
        if worth > self._best * (1 + 1e-12):
            self.chosen, self._best = np.array(sorted(chosen), np.int64), worth


def _matrix(columns: Columns, jobs: int, kinds: int) -> csr_array:
    at = np.arange(len(columns))
    is_pair = columns.b >= 0
    rows = np.concatenate([columns.a, columns.b[is_pair], jobs + columns.kind])
    cols = np.concatenate([at, at[is_pair], at])
    data = np.concatenate([np.ones(len(at) + int(is_pair.sum())), columns.devices])
    return csr_array((data, (rows, cols)), shape=(jobs + kinds, len(columns)))
