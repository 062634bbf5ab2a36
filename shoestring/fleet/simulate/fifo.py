"""First come, first served as Gavel's simulator does it: the yardstick that shows ours is the same one.

Plain first come, first served gives a free device to the job that waits
longest and never moves it. Gavel's differs in ways that show in its figures,
and its figures are what others compare with, so they are followed here:

- A job is tied to one kind. New ties are made when jobs came or went and at
  least 1920 s have passed since the last time; nothing else changes them.
- Kinds are taken from the end of the alphabet. When a kind is full, one of the
  kinds with room is drawn and struck off instead of the full one; a full kind
  that stays is then given all who wait, beyond its devices.
- Jobs tied to a kind take turns by round: first who had the smallest part of
  the kind's time since the ties were made, then who was owed more before.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shoestring.fleet.allocate.plan import Demand, Placement, Pool

_BETWEEN_TIES_S = 1920.0


@dataclass
class _Turns:
    """A job's time on each kind since the ties were made, and what it was owed before."""

    had_s: dict[str, float]
    owed_s: dict[str, float] = field(default_factory=dict)


class GavelFifo:
    """Decides round by round; keeps the ties and turns between the rounds."""

    def __init__(self, pools: Sequence[Pool], round_s: float, seed: int = 0) -> None:
        self._counts = {pool.kind: pool.count for pool in pools}
        self._head_start_s = round_s / 2  # so that a job that has not run yet has a finite turn
        self._draw = random.Random(seed)
        self._ties: dict[str, str] = {}
        self._binding: dict[str, str] = {}
        self._turns: dict[str, _Turns] = {}
        self._tied_at_s = 0.0
        self._is_stale = True

    def note_start(self, job: str) -> None:
        """A job has arrived."""
        self._turns[job] = _Turns(dict.fromkeys(self._counts, self._head_start_s))
        self._turns[job].owed_s = dict.fromkeys(self._counts, 0.0)
        self._is_stale = True

    def note_run(self, job: str, kind: str, ran_s: float) -> None:
        """A job has run, and is not done."""
        self._turns[job].had_s[kind] += ran_s

    def note_end(self, job: str) -> None:
        """A job is done."""
        del self._turns[job]
        self._is_stale = True

    def note_idle(self) -> None:
        """Nothing ran: make new ties whatever the time."""
        self._tied_at_s = 0.0

    def decide(self, now_s: float, demands: Sequence[Demand]) -> list[Placement]:
        """Return who runs in the round that starts now; `demands` come in order of arrival."""
        by_name = {demand.job: demand for demand in demands}
        if self._is_stale and (self._tied_at_s == 0 or now_s - self._tied_at_s >= _BETWEEN_TIES_S):
            self._settle_turns(now_s)
            self._tie(by_name)
            self._binding = {job: kind for job, kind in self._ties.items() if job in by_name}
            self._is_stale = False
        placements = []
        for kind, count in self._counts.items():
            tied = [job for job in by_name if self._binding.get(job) == kind]
            # Both sorts are stable: jobs with equal turns stay in order of arrival.
            tied.sort(key=lambda job: -self._turns[job].owed_s[kind])
            tied.sort(key=lambda job: self._turns[job].had_s[kind])
            for job in tied:
                demand = by_name[job]
                if demand.devices <= count:
                    count -= demand.devices
                    placements.append(Placement(kind, (job,), demand.devices, (demand.speeds[kind],)))
        return placements

    def _settle_turns(self, now_s: float) -> None:
        """Start new turns; what a job should have had of a kind and did not stays owed."""
        for job, turns in self._turns.items():
            for kind in self._counts:
                due = now_s - self._tied_at_s if self._binding.get(job) == kind else 0.0
                turns.owed_s[kind] += due - (turns.had_s[kind] - self._head_start_s)
                turns.had_s[kind] = self._head_start_s
        self._tied_at_s = now_s

    def _tie(self, by_name: Mapping[str, Demand]) -> None:
        room = dict(self._counts)
        queue = [demand for job, demand in by_name.items() if job not in self._ties]
        order = {job: at for at, job in enumerate(self._ties)}
        for job, kind in sorted(self._ties.items(), key=lambda tie: order[tie[0]]):
            if job in by_name:
                room[kind] -= by_name[job].devices
                continue
            # The first who waits takes the place of one who is done.
            if queue and queue[0].devices <= room[kind] and queue[0].speeds.get(kind, 0.0) > 0:
                heir = queue.pop(0)
                self._ties[heir.job] = kind
                room[kind] -= heir.devices
            del self._ties[job]
        kinds = sorted(kind for kind, left in room.items() if left > 0)
        while queue and kinds:
            demand = queue.pop(0)
            with_room = [at for at, kind in enumerate(kinds) if room[kind] >= demand.devices]
            if not with_room:
                break
            drawn = with_room[self._draw.randrange(len(with_room))]
            kind = kinds[-1]
            if demand.speeds.get(kind, 0.0) > 0:
                self._ties[demand.job] = kind
                room[kind] -= demand.devices
                if room[kind] == 0:
                    kinds.pop(drawn)
