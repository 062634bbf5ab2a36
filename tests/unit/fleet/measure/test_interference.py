"""Two jobs on one device: the model's limits, and what is seen in its place."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoestring.fleet.allocate.plan import Demand
from shoestring.fleet.measure.interference import Interference, Load, add_sight, blend, predict

parts = st.floats(0, 1)


def test_two_that_are_always_busy_halve_each_other():
    assert predict(Load(1.0), Load(1.0)) == pytest.approx((0.5, 0.5))


def test_one_that_needs_no_device_disturbs_nobody():
    assert predict(Load(1.0), Load(0.0)) == (1.0, 1.0)


def test_bandwidth_bounds_both():
    assert predict(Load(0.0, 0.8), Load(0.0, 0.8)) == pytest.approx((1 / 1.6, 1 / 1.6))


@given(parts, parts, parts)
def test_a_busier_neighbour_is_never_better(own, less, more):
    less, more = sorted((less, more))
    mild, hard = predict(Load(own), Load(less)), predict(Load(own), Load(more))
    assert hard[0] <= mild[0] + 1e-9
    for factor in (*mild, *hard):
        assert 0.5 - 1e-9 <= factor <= 1.0


@given(parts, parts)
def test_the_device_is_never_used_beyond_its_time(a, b):
    factors = predict(Load(a), Load(b))
    assert a * factors[0] + b * factors[1] <= 1 + 1e-6


def test_what_was_seen_outweighs_the_model_with_time():
    assert blend(0.5, 0.9, 0.0) == 0.5
    assert blend(0.5, 0.9, 30.0) == pytest.approx(0.7)
    assert blend(0.5, 0.9, 1e9) == pytest.approx(0.9)


def test_sights_are_weighed_by_their_seconds():
    assert add_sight(None, 0.8, 10) == (0.8, 10)
    assert add_sight((0.8, 10), 0.6, 30) == pytest.approx((0.65, 40))
    factor, seconds = add_sight((0.8, 1e6), 0.5, 600)
    assert factor == pytest.approx(0.65)  # an old sight does not outweigh a new one for ever
    assert seconds == 1200


def demand(job, devices=1, **speeds):
    return Demand(job, job, 100, speeds, devices=devices)


def test_together_scales_the_speeds_alone():
    pairs = Interference({("a", "v100"): Load(1.0), ("b", "v100"): Load(1.0)})
    assert pairs.together(demand("a", v100=8.0), demand("b", v100=2.0), "v100") == pytest.approx((4.0, 1.0))


def test_a_pair_that_was_seen_is_asymmetric():
    loads = {("a", "v100"): Load(1.0), ("b", "v100"): Load(1.0)}
    pairs = Interference(loads, {("v100", "a", "b"): (0.9, 1e9)})
    assert pairs.together(demand("a", v100=10), demand("b", v100=10), "v100") == pytest.approx((9.0, 5.0))


@pytest.mark.parametrize(
    ("a", "b", "kind"),
    [
        (demand("a", v100=1), demand("b", v100=1), "k80"),  # never measured there
        (demand("a", devices=2, v100=1), demand("b", v100=1), "v100"),  # needs several devices
        (demand("a", v100=1), demand("b"), "v100"),  # cannot run there
    ],
)
def test_some_cannot_share(a, b, kind):
    pairs = Interference({("a", "v100"): Load(0.1), ("b", "v100"): Load(0.1)})
    assert pairs.together(a, b, kind) is None
