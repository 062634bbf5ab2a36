"""What the allocator is told and answers: values that are checked when they are made."""

import math

import pytest

from shoestring.errors import FleetError
from shoestring.fleet.allocate.plan import Demand, Placement, Plan, Pool, check_names, served_by

SPEEDS = {"fast": 4.0, "slow": 1.0}


@pytest.mark.parametrize(
    ("kwargs", "found"),
    [
        ({"remaining_steps": 0}, "0 steps left"),
        ({"remaining_steps": math.nan}, "nan steps left"),
        ({"remaining_steps": math.inf}, "inf steps left"),
        ({"devices": 0}, "asks for 0 devices"),
        ({"weight": 0.0}, "priority 0.0"),
        ({"weight": -1.0}, "priority -1.0"),
        ({"speeds": {"fast": -1.0}}, "-1.0 steps/s on `fast`"),
        ({"speeds": {"fast": math.nan}}, "nan steps/s on `fast`"),
    ],
)
def test_wrong_demands_are_refused(kwargs, found):
    good = {"job": "a", "kind_of_work": "w", "remaining_steps": 10, "speeds": SPEEDS}
    assert Demand(**good).devices == 1
    with pytest.raises(FleetError, match=found) as caught:
        Demand(**{**good, **kwargs})
    assert caught.value.hint


@pytest.mark.parametrize(
    ("args", "found"),
    [
        (("k", -1), "-1 devices"),
        (("k", 1, -1), "-1 bytes"),
        (("k", 1, None, math.nan), "costs nan"),
        (("k", 1, None, -2.0), "costs -2.0"),
    ],
)
def test_wrong_pools_are_refused(args, found):
    with pytest.raises(FleetError, match=found):
        Pool(*args)


def test_names_are_given_once():
    demand = Demand("a", "w", 1, SPEEDS)
    check_names([demand], [Pool("fast", 1), Pool("slow", 1)])
    with pytest.raises(FleetError, match="job `a` is given twice"):
        check_names([demand, demand], [])
    with pytest.raises(FleetError, match="device kind `fast` is given twice"):
        check_names([], [Pool("fast", 1), Pool("fast", 2)])


def test_plan_says_where_and_why():
    alone, both = Placement("fast", ("a",), 2, (4.0,)), Placement("slow", ("b", "c"), 1, (0.5, 0.6))
    plan = Plan(
        (alone, both), {"d": "waits"}, {"a": "x", "b": "y", "c": "z", "d": "waits"}, score=9, bound=10
    )
    assert (plan.placement_of("a"), plan.placement_of("c"), plan.placement_of("d")) == (alone, both, None)
    assert (alone.is_packed, both.is_packed) == (False, True)
    assert plan.why("d") == "waits"
    with pytest.raises(FleetError, match="no job `e`"):
        plan.why("e")
    assert plan.devices_in_use() == {"fast": 2, "slow": 1}
    assert plan.gap == pytest.approx(0.1)
    assert Plan(()).gap is None
    assert Plan((), bound=0.0).gap == 0.0


def test_served_is_speed_over_the_mean_device():
    pools = [Pool("fast", 1), Pool("slow", 2)]  # mean speed (4 + 1 + 1) / 3 = 2
    assert served_by(100, 50.0, SPEEDS, pools) == 1.0
    assert served_by(0, 0.0, SPEEDS, pools) == 0.0
    assert served_by(10, 5.0, {}, pools) == 0.0
