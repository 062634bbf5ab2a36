"""A line through measurements, and how sure it is."""

import random

import pytest

from shoestring.fleet.measure.fit import fit_line, largest_within, near_line, next_size


def test_points_on_a_line_give_that_line():
    line = fit_line([8, 16, 64], [3.0, 5.0, 17.0])
    assert line.at_zero == pytest.approx(1.0, abs=1e-12)
    assert line.slope == pytest.approx(0.25, abs=1e-12)
    assert line.at(32) == pytest.approx(9.0, abs=1e-12)
    assert line.error(32) == pytest.approx(0.0, abs=1e-9)
    assert line.worst_residual == pytest.approx(0.0, abs=1e-12)


def test_residuals_are_measured_less_predicted():
    line = fit_line([1, 2, 3], [1.0, 3.0, 2.0])
    assert line.residuals == pytest.approx((-0.5, 1.0, -0.5))
    assert [line.at(x) + r for x, r in zip(line.xs, line.residuals, strict=True)] == pytest.approx([1, 3, 2])


def test_neither_part_is_negative():
    falling = fit_line([1, 2, 3], [3.0, 2.5, 2.0])
    assert (falling.at_zero, falling.slope) == (2.5, 0.0)
    steep = fit_line([1, 2, 3], [1.0, 4.0, 9.0])
    assert steep.at_zero == 0.0
    assert steep.slope == pytest.approx((1 + 8 + 27) / 14)


def test_one_size_is_taken_in_proportion_and_unsure():
    line = fit_line([10], [5.0])
    assert line.at(20) == 10.0
    assert line.error(10) == pytest.approx(0.5)
    assert line.error(20) > 1.0


def test_no_size_is_refused():
    with pytest.raises(ValueError, match="0 sizes"):
        fit_line([], [])


def test_error_bars_hold_what_is_then_measured():
    """Two standard errors hold about 95 % of new measurements; with 6 points, 4 degrees of freedom: 88 %."""
    source = random.Random(0)
    sizes, inside, trials = [4, 8, 16, 24, 32, 48], 0, 2000
    for _ in range(trials):
        line = fit_line(sizes, [10 + 0.5 * x + source.gauss(0, 1) for x in sizes])
        new = 10 + 0.5 * 40 + source.gauss(0, 1)
        inside += abs(new - line.at(40)) <= line.error(40)
    # Student's t with 4 degrees of freedom is within 2 with probability 0.884; five standard errors of 2000.
    assert inside / trials == pytest.approx(0.884, abs=5 * (0.884 * 0.116 / trials) ** 0.5)


def test_the_error_grows_away_from_what_was_measured():
    line = fit_line([4, 8, 16], [1.0, 2.2, 3.9])
    assert line.error(10) < line.error(16) < line.error(64) < line.error(256)


def test_largest_within_leaves_a_margin():
    line = fit_line([1, 2, 3], [2.0, 3.0, 4.0])  # 1 + x
    assert largest_within(line, 4.0, [1, 2, 3], margin=0.0) == 3
    assert largest_within(line, 4.0, [1, 2, 3], margin=0.1) == 2
    assert largest_within(line, 1.0, [1, 2, 3], margin=0.0) is None


def test_a_size_is_said_by_those_near_it():
    sizes, peaks = [1, 2, 4, 64, 128, 256], [9.0, 9.0, 9.0, 65.0, 129.0, 257.0]  # bends at 8
    assert near_line(sizes, peaks, 512).at(512) == pytest.approx(513.0)
    assert near_line(sizes, peaks, 3).at(3) == pytest.approx(9.0)
    assert fit_line(sizes, peaks).at(512) != pytest.approx(513.0, rel=0.003)


def bent(batch: int) -> float:
    """The optimizer takes 100, a backward pass 4 and 1/2 a sample."""
    return max(100.0 + batch / 100, 4 + batch / 2)


def test_far_sizes_are_reached_by_leaps_that_keep_the_prediction_good():
    allowed, limit = list(range(1, 40_001)), 5000.0
    sizes = [4, 8, 16]
    while True:
        peaks = [bent(size) for size in sizes]
        size = next_size(sizes, peaks, limit, allowed, margin=0.05)
        if size is None:
            break
        assert bent(size) < limit
        off = near_line(sizes, peaks, size).at(size) / bent(size) - 1
        sizes.append(size)
    assert abs(off) < 0.001
    assert 9_000 < sizes[-1] <= 10_000


def test_a_near_size_is_measured_at_once_and_none_twice():
    assert next_size([1, 2, 3], [2.0, 3.0, 4.0], 7.0, [3, 4, 5, 6], margin=0.0) == 5
    assert next_size([1, 2, 3], [2.0, 3.0, 4.0], 4.0, [1, 2, 3, 4], margin=0.0) is None
    assert next_size([1, 2], [2.0, 3.0], 1000.0, [], margin=0.0) is None
    assert next_size([1, 2], [2.0, 3.0], 1000.0, [2, 500], margin=0.0) == 500  # there is none between
