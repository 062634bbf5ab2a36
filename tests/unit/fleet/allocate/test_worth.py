"""What jobs are worth where, by objective: only proportions within one decision mean something."""

import math
from dataclasses import replace

import numpy as np
import pytest

from shoestring.fleet.allocate.pairing import group, share
from shoestring.fleet.allocate.plan import Demand, Pool
from shoestring.fleet.allocate.worth import Case, value

POOLS = [Pool("fast", 1, cost_per_hour=8.0), Pool("slow", 2, cost_per_hour=1.0)]


def job(name, steps, **given):
    return Demand(name, name, steps, {"fast": 4.0, "slow": 1.0}, **given)


def worth(objective, *demands):
    groups = group(demands, POOLS)
    case = Case(
        demands,
        POOLS,
        np.array([[demand.speeds[pool.kind] for pool in POOLS] for demand in demands]),
        np.array([float(demand.remaining_steps) for demand in demands]),
        np.array([demand.devices for demand in demands]),
        np.array([pool.count for pool in POOLS]),
        np.array([demand.weight for demand in demands]),
        groups,
        share(demands, POOLS, groups, None, 0.0, []),
        360.0,
    )
    assert case.fit.tolist() == [[1.0, 0.25]] * len(demands)
    return value(objective, case, math.inf)


def test_short_jobs_and_kinds_that_suit_come_first():
    found = worth("jct", job("short", 4e3), job("long", 4e5)).worth
    assert found[:, 0] == pytest.approx(4 * found[:, 1])
    assert found[0, 0] / found[1, 0] == pytest.approx(100**0.4)


def test_weights_multiply():
    plain, heavy = (worth("fair", job("a", 10, weight=weight)).worth for weight in (1.0, 7.0))
    assert heavy == pytest.approx(7 * plain)


def test_the_least_served_counts_most():
    found = worth("fair", job("had", 10, served=0.99), job("not", 10, served=0.0)).worth
    assert found[1] / found[0] == pytest.approx([100.0**2] * 2)


def test_a_kind_that_is_dear_for_a_job_is_worth_nothing():
    """Four times as fast for eight times the price."""
    assert (worth("cost", job("a", 100)).worth > 0).tolist() == [[False, True]]


def test_makespan_knows_the_soonest_end():
    assert worth("makespan", job("a", 4e3), job("b", 1e3)).end_s == pytest.approx(1000.0)
    assert worth("jct", job("a", 4e3)).end_s is None


def test_a_deadline_that_can_just_be_met_outweighs_all_else():
    short, late = job("short", 4), job("late", 4e5, deadline_s=1.001e5)
    found = worth("jct", short, late).worth
    assert found[1, 0] >= 1000 * found[0, 0]  # on the fast kind
    assert found[1, 1] < found[0, 1]  # on the slow one it is missed
    relaxed = worth("jct", short, replace(late, deadline_s=1e9)).worth
    assert relaxed[1, 0] < relaxed[0, 0]
