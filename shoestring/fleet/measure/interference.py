"""How two jobs slow each other when they share a device.

The model: alone, a job keeps the device busy for a part `u` of each step and needs it not at
all for the rest (it waits for data, launches, the host). Two that share it take turns, so the
busy part takes twice as long while the other is busy too. How often that is, follows from
both: with `b` the part of its time that a job is busy or waits for its turn,

    slower_1 = 1 + u_1 * b_2        b_1 = u_1 * (1 + b_2) / slower_1        and likewise for 2.

Two jobs that are busy all the time run at half speed each. Where the memory's bandwidth is
the narrower of the two, its sum bounds both. It is a first guess: what was seen of a pair
while it ran takes its place, the more the longer it was seen.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from shoestring.fleet.allocate.plan import Demand

TRUSTED_S = 30.0  # seen for so long, a pair's own figure weighs as much as the model
_KNOWN_S = 600.0  # the most that all earlier sights of a pair weigh: so old ones fade

Seen = Mapping[tuple[str, str, str], tuple[float, float]]


@dataclass(frozen=True)
class Load:
    """The part of a device that a job takes, alone: of its time, and of its memory's bandwidth."""

    busy: float
    bandwidth: float = 0.0


def predict(a: Load, b: Load) -> tuple[float, float]:
    """The speeds of two jobs together, as parts of their speeds alone."""
    busy_a, busy_b = a.busy, b.busy
    for _ in range(50):  # it contracts: far fewer would do
        slower_a, slower_b = 1 + a.busy * busy_b, 1 + b.busy * busy_a
        busy_a, busy_b = a.busy * (1 + busy_b) / slower_a, b.busy * (1 + busy_a) / slower_b
    narrow = max(1.0, a.bandwidth + b.bandwidth)
    return min(1 / (1 + a.busy * busy_b), 1 / narrow), min(1 / (1 + b.busy * busy_a), 1 / narrow)


def blend(guess: float, factor: float, seen_s: float) -> float:
    """Weigh the model's guess against what was seen for so long."""
    trust = seen_s / (seen_s + TRUSTED_S)
    return (1 - trust) * guess + trust * factor


def add_sight(before: tuple[float, float] | None, factor: float, seconds: float) -> tuple[float, float]:
    """Add that a job ran at this part of its speed for some seconds; return the mean and all seconds."""
    if before is None or before[1] <= 0:
        return factor, seconds
    weight = min(before[1], _KNOWN_S)
    return (before[0] * weight + factor * seconds) / (weight + seconds), weight + seconds


@dataclass
class Interference:
    """Speeds of pairs for the allocator, from loads by `(kind_of_work, kind)` and what was seen."""

    loads: Mapping[tuple[str, str], Load]
    seen: Seen = field(default_factory=dict)

    def factors(self, a: str, b: str, kind: str) -> tuple[float, float] | None:
        """How fast two kinds of work are together, as parts of their speeds alone; None if unknown."""
        load_a, load_b = self.loads.get((a, kind)), self.loads.get((b, kind))
        if load_a is None or load_b is None:
            return None
        guess_a, guess_b = predict(load_a, load_b)
        seen_a, seen_b = self.seen.get((kind, a, b)), self.seen.get((kind, b, a))
        return (
            blend(guess_a, *seen_a) if seen_a else guess_a,
            blend(guess_b, *seen_b) if seen_b else guess_b,
        )

    def together(self, a: Demand, b: Demand, kind: str) -> tuple[float, float] | None:
        """The steps/s of two jobs that share a device of this kind; only jobs of one device share."""
        factors = self.factors(a.kind_of_work, b.kind_of_work, kind)
        if factors is None or a.devices != 1 or b.devices != 1:
            return None
        speeds = a.speeds.get(kind, 0.0) * factors[0], b.speeds.get(kind, 0.0) * factors[1]
        return speeds if min(speeds) > 0 else None
