"""Give each placement of a plan its own devices, so that jobs stay where they are.

A plan counts devices by kind; somebody has to say which. A placement keeps the
devices of one of its jobs where nobody else keeps them; the rest get devices
that are left, the lowest numbers first.
"""

from collections.abc import Sequence

from shoestring.errors import FleetError
from shoestring.fleet.allocate.plan import Placement, Pool

Seat = tuple[str, tuple[int, ...]]


class Seats:
    """Who sits where from round to round."""

    def __init__(self, pools: Sequence[Pool]) -> None:
        self._counts = {pool.kind: pool.count for pool in pools}
        self._of: dict[str, Seat] = {}

    def seat_of(self, job: str) -> Seat | None:
        """Return the kind and the numbers of a job's devices; None if it has none."""
        return self._of.get(job)

    def leave(self, job: str) -> None:
        """Forget a job that is done."""
        self._of.pop(job, None)

    def assign(self, placements: Sequence[Placement]) -> set[str]:
        """Seat the jobs of the placements, and nobody else; return those that are not where they were."""
        before, self._of = self._of, {}
        free = {kind: set(range(count)) for kind, count in self._counts.items()}
        rest = []
        # Pairs that stay together first: they would otherwise lose their devices to one half of another pair.
        for place in sorted(placements, key=lambda place: -_staying(place, before)):
            for job in place.jobs:
                kind, numbers = before.get(job, ("", ()))
                if kind == place.kind and len(numbers) == place.devices and free[kind].issuperset(numbers):
                    self._sit(place, numbers, free)
                    break
            else:
                rest.append(place)
        for place in rest:
            numbers = tuple(sorted(free.get(place.kind, ()))[: place.devices])
            if len(numbers) < place.devices:
                raise FleetError(
                    f"the plan gives out more than the {self._counts.get(place.kind, 0)} `{place.kind}`",
                    hint="plan again for these devices",
                )
            self._sit(place, numbers, free)
        return {job for job, seat in self._of.items() if before.get(job) != seat}

    def _sit(self, place: Placement, numbers: tuple[int, ...], free: dict[str, set[int]]) -> None:
        free[place.kind].difference_update(numbers)
        for job in place.jobs:
            self._of[job] = (place.kind, numbers)


def _staying(place: Placement, before: dict[str, Seat]) -> int:
    seats = [before.get(job) for job in place.jobs]
    return sum(seat is not None and seat[0] == place.kind and seat == seats[0] for seat in seats)
