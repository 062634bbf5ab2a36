"""Split one job's global batch over unequal devices, so that the slowest is done as soon as can be.

A device takes `fixed_s + sample_s * n` for n samples, and `most` samples at once. The samples of
a batch are given out one by one, each to the device that would be done with it first. That is
the optimum, not an approximation: the time of a device only grows with its samples, so all
that can be done within a time is given out before anything later is.

A device whose fixed cost alone is more than the others need gets nothing: it would only slow
them down. `least` says that a device must take part all the same.

Speeds drift. `rebalance` looks at what the devices took, and answers with another split only
where that gains more than a threshold: noise within about half the threshold changes nothing.
"""

import heapq
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shoestring.errors import FleetError

GAIN = 0.05  # of a step's time, before samples are moved
_BISECTIONS = 60


@dataclass(frozen=True)
class Curve:
    """The time of a step on one device by samples, and how many samples fit the device."""

    fixed_s: float
    sample_s: float
    most: int
    least: int = 0

    def __post_init__(self) -> None:
        costs = (self.fixed_s, self.sample_s)
        if not all(math.isfinite(cost) and cost >= 0 for cost in costs) or not 0 <= self.least <= self.most:
            raise FleetError(
                f"{self} is no cost of a step", hint="profile the device again: `shoestring fleet profile`"
            )

    def at(self, samples: int) -> float:
        """Seconds for a step of so many samples; none for a device that is left out."""
        return self.fixed_s + self.sample_s * samples if samples else 0.0

    def within(self, time_s: float) -> int:
        """The most samples that are done within a time, `least` at least."""
        return max(self.least, bisect_right(range(self.most + 1), time_s, key=self.at) - 1)

    def slower(self, factor: float) -> "Curve":
        """The same device when all takes so many times as long."""
        return replace(self, fixed_s=factor * self.fixed_s, sample_s=factor * self.sample_s)


@dataclass(frozen=True)
class Split:
    """The samples of each device; 0 for a device that is left out."""

    batches: tuple[int, ...]
    curves: tuple[Curve, ...]

    @property
    def step_s(self) -> float:
        """Seconds a step takes: those of the slowest device."""
        return max(curve.at(batch) for curve, batch in zip(self.curves, self.batches, strict=True))

    @property
    def weights(self) -> tuple[float, ...]:
        """The weight of each device's mean gradient in the mean over all samples."""
        return tuple(batch / sum(self.batches) for batch in self.batches)


def split(global_batch: int, curves: Sequence[Curve]) -> Split:
    """Return the split whose slowest device is done soonest; of equal devices the first gets more."""
    least, most = sum(curve.least for curve in curves), sum(curve.most for curve in curves)
    if not max(1, least) <= global_batch <= most:
        raise FleetError(
            f"a global batch of {global_batch} for devices that take {least} to {most} samples",
            hint="change the batch, or the devices that take part",
        )
    batches = _nearly(global_batch, curves)
    done = [
        (curve.at(batch + 1), place)
        for place, (curve, batch) in enumerate(zip(curves, batches, strict=True))
        if batch < curve.most
    ]
    heapq.heapify(done)
    for _ in range(global_batch - sum(batches)):
        _, place = heapq.heappop(done)
        batches[place] += 1
        if batches[place] < curves[place].most:
            heapq.heappush(done, (curves[place].at(batches[place] + 1), place))
    return Split(tuple(batches), tuple(curves))


def rebalance(current: Split, measured_s: Sequence[float]) -> Split | None:
    """Return a better split for the speeds that were measured, or None while that gains little.

    `measured_s` is what each device took for its part of the current split; the time of one that
    was left out is not looked at. A device that took longer than its curve says is taken to be
    slower by that factor, with any batch. Give medians over some steps rather than single ones.
    """
    curves = []
    for curve, batch, time_s in zip(current.curves, current.batches, measured_s, strict=True):
        expected_s = curve.at(batch)
        if batch and not (math.isfinite(time_s) and time_s > 0):
            raise FleetError(f"a step took {time_s} s", hint="measure every device that takes part")
        curves.append(curve.slower(time_s / expected_s) if expected_s else curve)
    now = replace(current, curves=tuple(curves))
    better = split(sum(current.batches), curves)
    return better if better.step_s < (1 - GAIN) * now.step_s else None


def _nearly(global_batch: int, curves: Sequence[Curve]) -> list[int]:
    """Give out what devices do within a time: the longest in which they take no more than the batch."""
    enough = max(curve.at(curve.most) for curve in curves)
    too_little = 0.0
    for _ in range(_BISECTIONS):
        middle = (too_little + enough) / 2
        if sum(curve.within(middle) for curve in curves) <= global_batch:
            too_little = middle
        else:
            enough = middle
    given = [curve.within(too_little) for curve in curves]
    return given if sum(given) <= global_batch else [curve.least for curve in curves]
