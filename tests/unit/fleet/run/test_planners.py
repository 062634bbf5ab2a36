"""The yardsticks: first come first served, and dealing in turn."""

import pytest

from shoestring.errors import UsageError
from shoestring.fleet.allocate.plan import Demand, Pool
from shoestring.fleet.measure.interference import Interference
from shoestring.fleet.run.estimate import Estimates
from shoestring.fleet.run.planners import even, fifo, make_planner


def estimates(*demands, fast=1, slow=1):
    return Estimates(list(demands), [Pool("fast", fast), Pool("slow", slow)], Interference({}), {}, 0.0)


def demand(job, running_on=None, devices=1, **speeds):
    return Demand(job, job, 100, speeds or {"fast": 4.0, "slow": 1.0}, devices=devices, running_on=running_on)


def shape(plan):
    return [(place.kind, place.jobs) for place in plan.placements]


def test_fifo_takes_jobs_in_their_order():
    plan = fifo(estimates(demand("a"), demand("b"), demand("c")), None)
    assert shape(plan) == [("fast", ("a",)), ("slow", ("b",))]
    assert plan.waiting == {"c": "`c` waits for its turn"}
    assert set(plan.reasons) == {"a", "b", "c"}


def test_fifo_moves_nobody():
    plan = fifo(estimates(demand("a"), demand("b", running_on="slow"), demand("c", running_on="fast")), None)
    assert shape(plan) == [("slow", ("b",)), ("fast", ("c",))]


def test_fifo_passes_over_kinds_a_job_cannot_use():
    plan = fifo(estimates(demand("a", slow=1.0), demand("b", devices=2), demand("c")), None)
    assert shape(plan) == [("slow", ("a",)), ("fast", ("c",))]
    assert list(plan.waiting) == ["b"]


def test_even_deals_in_turn_and_shares():
    plan = even(estimates(demand("a"), demand("b"), demand("c")), None)
    assert shape(plan) == [("fast", ("a", "c")), ("slow", ("b",))]
    assert plan.placements[0].speeds == (2.0, 2.0)


def test_even_keeps_jobs_where_they_are_and_has_two_on_a_device_at_most():
    jobs = [demand("a", running_on="slow"), *(demand(name) for name in "bcde")]
    plan = even(estimates(*jobs), None)
    assert shape(plan) == [("fast", ("b", "c")), ("slow", ("a", "d"))]
    assert list(plan.waiting) == ["e"]


def test_an_unknown_name_is_refused():
    with pytest.raises(UsageError, match="`--planner best` names no planner"):
        make_planner("best")


def test_the_plan_is_the_allocators():
    plan = make_planner("plan")(estimates(demand("a"), demand("b")), None)
    assert sorted(shape(plan)) in ([("fast", ("a",)), ("slow", ("b",))], [("fast", ("b",)), ("slow", ("a",))])
