"""The split is the best there is, stays when little changes, and follows when speeds drift."""

import itertools
import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from shoestring.errors import FleetError
from shoestring.fleet.allocate.split import GAIN, Curve, rebalance, split

COSTS = st.sampled_from([0.0, 0.1, 0.25, 1.0, 3.0]) | st.floats(0, 10)
CURVES = st.builds(
    lambda fixed, sample, most, least: Curve(fixed, sample, most, min(least, most)),
    COSTS,
    COSTS,
    st.integers(0, 8),
    st.integers(0, 2),
)
LARGE = st.builds(Curve, st.floats(0, 1), st.floats(1e-6, 1e-2), st.integers(1_000, 1_000_000))


def brute_force(global_batch, curves):
    """What the slowest device takes in the best split, by trying all."""
    ranges = [range(curve.least, curve.most + 1) for curve in curves]
    return min(
        max(curve.at(batch) for curve, batch in zip(curves, batches, strict=True))
        for batches in itertools.product(*ranges)
        if sum(batches) == global_batch
    )


@given(st.data(), st.lists(CURVES, min_size=1, max_size=4))
def test_no_split_is_better(data, curves):
    least, most = sum(curve.least for curve in curves), sum(curve.most for curve in curves)
    assume(most >= max(1, least))
    global_batch = data.draw(st.integers(max(1, least), most))
    found = split(global_batch, curves)
    assert sum(found.batches) == global_batch
    assert all(curve.least <= batch <= curve.most for curve, batch in zip(curves, found.batches, strict=True))
    assert found.step_s == brute_force(global_batch, curves)


@given(st.lists(LARGE, min_size=1, max_size=40), st.integers(1, 1_000_000))
def test_large_batches_are_split_as_well(curves, global_batch):
    assume(global_batch <= sum(curve.most for curve in curves))
    found = split(global_batch, curves)
    assert sum(found.batches) == global_batch
    # Nothing less would do: within any shorter time fewer samples are done.
    shorter_s = math.nextafter(found.step_s, 0)
    assert sum(curve.within(shorter_s) for curve in curves) < global_batch


@given(CURVES, st.floats(0, 100))
def test_within_is_what_the_curve_says(curve, time_s):
    done = [n for n in range(curve.most + 1) if n <= curve.least or curve.at(n) <= time_s]
    assert curve.within(time_s) == max(done)


def test_speeds_of_one_to_three_give_twice_the_even_split():
    slow, fast = Curve(0.0, 3.0, 64), Curve(0.0, 1.0, 64)
    found = split(64, [slow, fast])
    assert found.batches == (16, 48)
    assert found.weights == (0.25, 0.75)
    even_s = max(slow.at(32), fast.at(32))
    assert even_s / found.step_s == 2.0


def test_memory_is_kept_to():
    assert split(64, [Curve(0.0, 1.0, 8), Curve(0.0, 9.0, 64)]).batches == (8, 56)


def test_a_device_that_only_slows_the_rest_down_is_left_out():
    fast, late = Curve(0.1, 0.01, 100), Curve(2.0, 0.001, 100)
    assert split(64, [fast, late]).batches == (64, 0)
    assert split(64, [fast, late]).step_s == fast.at(64)
    assert split(64, [fast, Curve(2.0, 0.001, 100, least=1)]).batches[1] >= 1
    assert split(150, [fast, late]).batches == (100, 50)  # needed for its memory


def test_equal_devices_share_equally_and_the_first_gets_more():
    assert split(10, [Curve(0.5, 0.1, 10)] * 3).batches == (4, 3, 3)
    assert split(5, [Curve(1.0, 0.0, 3)] * 2).batches == (3, 2)


@pytest.mark.parametrize(("batch", "curves"), [(0, [Curve(0, 1, 5)]), (6, [Curve(0, 1, 5)]), (1, [])])
def test_what_does_not_fit_is_refused(batch, curves):
    with pytest.raises(FleetError, match=f"a global batch of {batch}"):
        split(batch, curves)


def test_a_batch_below_what_devices_must_take_is_refused():
    with pytest.raises(FleetError, match="take 4 to 10"):
        split(3, [Curve(0, 1, 5, least=2)] * 2)


@pytest.mark.parametrize(
    "curve", [(-1.0, 1.0, 5), (0.0, math.nan, 5), (math.inf, 1.0, 5), (0, 1, -1), (0, 1, 3, 4)]
)
def test_what_is_no_cost_is_refused(curve):
    with pytest.raises(FleetError, match="is no cost of a step"):
        Curve(*curve)


STEADY = [Curve(0.02, 0.003, 200), Curve(0.01, 0.001, 200), Curve(0.05, 0.002, 200)]


def measured(found, curves):
    return [curve.at(batch) for curve, batch in zip(curves, found.batches, strict=True)]


@given(st.lists(st.floats(0.98, 1.02), min_size=3, max_size=3), st.integers(50, 600))
def test_noise_moves_nothing(noise, global_batch):
    """Any split's time changes by 2 % at most, and 0.98 / 1.02 is more than 1 less the gain."""
    found = split(global_batch, STEADY)
    assert 1 - GAIN < 0.98 / 1.02
    seen = [time_s * factor for time_s, factor in zip(measured(found, STEADY), noise, strict=True)]
    assert rebalance(found, seen) is None


@given(st.lists(st.floats(0.3, 4), min_size=3, max_size=3), st.integers(50, 600))
def test_drift_is_followed_at_once_and_then_it_rests(factors, global_batch):
    found = split(global_batch, STEADY)
    assume(all(found.batches))
    now = [curve.slower(factor) for curve, factor in zip(STEADY, factors, strict=True)]
    best = split(global_batch, now)
    before_s = max(measured(found, now))
    new = rebalance(found, measured(found, now))
    if new is None:
        assert best.step_s >= (1 - GAIN) * before_s * (1 - 1e-9)
    else:
        # Factors go through a division and back: what they give may be off by rounding, no more.
        assert max(measured(new, now)) <= best.step_s * (1 + 1e-9)
        assert max(measured(new, now)) < (1 - GAIN) * before_s * (1 + 1e-9)
        assert rebalance(new, measured(new, now)) is None


def test_a_throttled_device_gives_samples_away():
    found = split(64, [Curve(0.0, 1.0, 64)] * 2)
    assert rebalance(found, [32.0, 33.0]) is None
    new = rebalance(found, [32.0, 96.0])
    assert new is not None
    assert new.batches == (48, 16)
    assert rebalance(new, [48.0, 48.0]) is None


def test_a_device_left_out_is_not_looked_at():
    found = split(64, [Curve(0.0, 1.0, 64), Curve(200.0, 1.0, 64)])
    assert found.batches == (64, 0)
    assert rebalance(found, [64.0, math.nan]) is None
    new = rebalance(found, [640.0, math.nan])
    assert new is not None
    assert new.batches[1] > 0


def test_a_time_that_is_none_is_refused():
    with pytest.raises(FleetError, match="a step took 0.0 s"):
        rebalance(split(4, [Curve(0.0, 1.0, 4)]), [0.0])
