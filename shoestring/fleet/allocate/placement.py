"""Choose the devices of each placement of a plan, for real runs and for simulations alike.

A plan counts devices by kind; `place_jobs` says which devices by name, and keeps jobs on the devices
they have as far as the plan allows:

- A placement takes over the devices of the first of its jobs whose devices are of the right kind
  and number and which no other placement took over before. Placements choose in the order of
  how many of their jobs stay together, those with more jobs first.
- All other placements get devices that no placement took over: first those that no job has now,
  as a job can start there at once.

A placement for which too few devices are left gets none: devices may have been lost since the
plan was made.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from shoestring.fleet.allocate.plan import Placement

Names = tuple[str, ...]  # of devices


@dataclass(frozen=True)
class Places:
    """The devices of each job after a decision, and how they differ from those it has.

    `starting` jobs begin on these devices, for the first time or from a checkpoint; `leaving`
    jobs give up the devices they have. A job that moves is in both sets.
    """

    devices: Mapping[str, Names]
    starting: frozenset[str]
    leaving: frozenset[str]


def place_jobs(placements: Sequence[Placement], kinds: Mapping[str, str], has: Mapping[str, Names]) -> Places:
    """Give each placement devices: `kinds` is the kind of every device, `has` the devices of running jobs."""
    names_of: dict[Placement, Names] = {}
    taken: set[str] = set()
    for placement in sorted(placements, key=lambda one: -_staying(one, kinds, has)):
        for names in _offers(placement, kinds, has):
            if taken.isdisjoint(names):
                names_of[placement] = names
                taken.update(names)
                break
    left = _by_kind([name for name in kinds if name not in taken], kinds, has)
    for placement in placements:
        own = left.get(placement.kind, [])
        if placement not in names_of and len(own) >= placement.devices:
            names_of[placement] = tuple(own[: placement.devices])
            del own[: placement.devices]
    devices = {job: names for placement, names in names_of.items() for job in placement.jobs}
    starting = frozenset(job for job, names in devices.items() if has.get(job) != names)
    leaving = frozenset(job for job, names in has.items() if devices.get(job) != names)
    return Places(devices, starting, leaving)


def _offers(placement: Placement, kinds: Mapping[str, str], has: Mapping[str, Names]) -> Iterator[Names]:
    """The devices that the jobs of a placement have, where these are what the placement needs."""
    for job in placement.jobs:
        names = has.get(job, ())
        if len(names) == placement.devices and all(kinds.get(name) == placement.kind for name in names):
            yield names


def _staying(placement: Placement, kinds: Mapping[str, str], has: Mapping[str, Names]) -> int:
    """Count the jobs of a placement that are where its first job is, on the placement's kind."""
    first = has.get(placement.jobs[0])
    if first is None or any(kinds.get(name) != placement.kind for name in first):
        return 0
    return sum(has.get(job) == first for job in placement.jobs)


def _by_kind(
    names: Sequence[str], kinds: Mapping[str, str], has: Mapping[str, Names]
) -> dict[str, list[str]]:
    """Sort devices into lists by kind, those that no job has in front."""
    used = {name for own in has.values() for name in own}
    found: dict[str, list[str]] = {}
    for name in sorted(names, key=used.__contains__):
        found.setdefault(kinds[name], []).append(name)
    return found
