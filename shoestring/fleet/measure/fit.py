"""A straight line through measurements, with error bars.

Step time and peak memory grow with the batch size by a constant and a slope: `y = at_zero +
slope * x`, neither below 0. An error bar is two standard errors of a prediction: the line's
own uncertainty and the scatter of the points about it. With one or two sizes the points say
nothing about scatter; then it is a fixed part of the value.

Over a wide range memory bends: at small sizes the optimizer's step takes the most, at large
ones the backward pass, and libraries choose other ways to compute. So
measurements at distant sizes say little about a size: `near_line` fits the nearest sizes, and
`next_size` goes up by leaps of at most `_LEAP` times.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

_UNKNOWN = 0.10  # the error of a prediction whose scatter is unknown, as a part of it
_NEAR = 3  # sizes that say what another one takes
_LEAP = 8  # times the largest size measured: beyond, one between is measured first
_FAR = 0.05  # added for each doubling beyond the largest measured size: lines bend


@dataclass(frozen=True)
class Line:
    """`at(x)` predicts, `error(x)` is its error bar; residuals are measured less predicted, in order."""

    at_zero: float
    slope: float
    xs: tuple[float, ...]
    residuals: tuple[float, ...]

    def at(self, x: float) -> float:
        return self.at_zero + self.slope * x

    def error(self, x: float) -> float:
        """Two standard errors of what `at(x)` predicts."""
        count, mean = len(self.xs), sum(self.xs) / len(self.xs)
        spread = sum((one - mean) ** 2 for one in self.xs)
        far = max(0.0, math.log2(x / max(self.xs))) if x > 0 and max(self.xs) > 0 else 0.0
        bend = _FAR * far * self.at(x)
        if count < 3 or spread == 0:
            return _UNKNOWN * self.at(x) + bend
        variance = sum(residual**2 for residual in self.residuals) / (count - 2)
        return 2 * math.sqrt(variance * (1 + 1 / count + (x - mean) ** 2 / spread)) + bend

    @property
    def worst_residual(self) -> float:
        """The largest residual as a part of its measurement; 0 for a line through its points."""
        pairs = [(self.at(x), residual) for x, residual in zip(self.xs, self.residuals, strict=True)]
        return max((abs(r) / abs(y + r) for y, r in pairs if y + r), default=0.0)


def fit_line(xs: Sequence[float], ys: Sequence[float]) -> Line:
    """Fit by least squares; with a single size, in proportion to it."""
    if not xs or len(xs) != len(ys):
        raise ValueError(f"{len(xs)} sizes and {len(ys)} values: expected as many, and one at least")
    count = len(xs)
    mean_x, mean_y = sum(xs) / count, sum(ys) / count
    spread = sum((x - mean_x) ** 2 for x in xs)
    if spread == 0:
        return _line(0.0, mean_y / mean_x if mean_x else 0.0, xs, ys)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread
    at_zero = mean_y - slope * mean_x
    if slope < 0:  # noise about a constant
        return _line(mean_y, 0.0, xs, ys)
    if at_zero < 0:  # through the origin
        squares = sum(x * x for x in xs)
        return _line(0.0, sum(x * y for x, y in zip(xs, ys, strict=True)) / squares, xs, ys)
    return _line(at_zero, slope, xs, ys)


def near_line(xs: Sequence[float], ys: Sequence[float], x: float) -> Line:
    """Fit the measurements whose sizes are nearest to `x`, in proportion."""
    by_distance = sorted(zip(xs, ys, strict=True), key=lambda point: abs(math.log(point[0] / x)))
    near = sorted(by_distance[:_NEAR])
    return fit_line([size for size, _ in near], [value for _, value in near])


def next_size(
    xs: Sequence[float], ys: Sequence[float], limit: float, sizes: Sequence[int], *, margin: float
) -> int | None:
    """The size to measure next on the way to the largest that stays below `limit`; None if that was measured.

    It is the largest itself, or one about half way, in proportion, if it is far.
    """
    known = max(xs)
    largest = largest_within(near_line(xs, ys, max(sizes, default=known)), limit, sizes, margin=margin)
    if largest is None or largest <= known:
        return None
    if largest > _LEAP * known:
        middle = math.sqrt(largest * known)
        between = [size for size in sizes if known < size < largest]
        return min(between, key=lambda size: abs(math.log(size / middle)), default=largest)
    return largest


def largest_within(line: Line, limit: float, sizes: Sequence[int], *, margin: float) -> int | None:
    """The largest of `sizes` whose prediction, error bar and margin stay below `limit`; None if none does."""
    fitting = [size for size in sizes if (line.at(size) + line.error(size)) * (1 + margin) <= limit]
    return max(fitting, default=None)


def _line(at_zero: float, slope: float, xs: Sequence[float], ys: Sequence[float]) -> Line:
    residuals = tuple(y - (at_zero + slope * x) for x, y in zip(xs, ys, strict=True))
    return Line(at_zero, slope, tuple(map(float, xs)), residuals)
