"""Random fleets: promises that hold whatever the fleet, and the best of small ones by trying all.

`benchmarks/fleet/random_fleets.py` runs these with far more examples.
"""

import os
import time
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoestring.fleet.allocate import decide as deciding
from shoestring.fleet.allocate.allocator import allocate
from shoestring.fleet.allocate.columns import PairColumns, singles
from shoestring.fleet.allocate.decide import Market, decide
from shoestring.fleet.allocate.fluid import shortest_end
from shoestring.fleet.allocate.pairing import group, share
from shoestring.fleet.allocate.plan import Plan
from tests.unit.fleet.fleets import best_by_trying, fleets

EXAMPLES = int(os.environ.get("SHOESTRING_EXAMPLES", "200"))
OBJECTIVES = st.sampled_from(["jct", "makespan", "fair", "cost"])
checked: Counter[str] = Counter()


def check_promises(plan: Plan, demands, pools, margin):
    by_name = {demand.job: demand for demand in demands}
    pool_of = {pool.kind: pool for pool in pools}
    placed = [job for place in plan.placements for job in place.jobs]
    assert sorted(placed + list(plan.waiting)) == sorted(by_name)  # every job once
    assert list(plan.reasons) == [demand.job for demand in demands]
    assert all(f"`{job}`" in why for job, why in plan.reasons.items())
    assert {job: plan.reasons[job] for job in plan.waiting} == dict(plan.waiting)
    assert all("waits: " in why for why in plan.waiting.values())
    for kind, count in plan.devices_in_use().items():
        assert count <= pool_of[kind].count
    for place in plan.placements:
        own, memory = [by_name[job] for job in place.jobs], pool_of[place.kind].memory_bytes
        assert len(own) in (1, 2)
        assert {demand.devices for demand in own} == {place.devices}
        assert all(
            0 < speed <= d.speeds[place.kind] * (1 + 1e-12)
            for speed, d in zip(place.speeds, own, strict=True)
        )
        needs = [(demand.memory_bytes or {}).get(place.kind) for demand in own]
        if memory is None:
            continue
        if place.is_packed:
            assert None not in needs
            assert sum(needs) <= (1 - margin) * memory
        else:
            assert needs[0] is None or needs[0] <= memory


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    fleets(12),
    OBJECTIVES,
    st.sampled_from([0.0, 0.1, 0.5]),
    st.sampled_from([0.0, 60.0, 1e5]),
    st.booleans(),
    st.sampled_from(["once", "again", "kept", "greedy"]),
)
def test_promises_hold(fleet, objective, margin, restart_cost_s, has_pairs, then):
    demands, pools, pairs = fleet
    asked = {
        "objective": objective,
        "pairs": pairs if has_pairs else None,
        "memory_margin": margin,
        "restart_cost_s": restart_cost_s,
    }
    plan = allocate(demands, pools, **asked)
    check_promises(plan, demands, pools, margin)
    assert plan.solver == "highs"
    assert plan.score <= plan.bound * (1 + 1e-6) + 1e-12
    # Who could run on what is left does, but for `cost`, where waiting may be cheaper.
    used = plan.devices_in_use()
    for demand in demands if objective != "cost" else ():
        if demand.job in plan.waiting and " s" in plan.waiting[demand.job]:
            for pool in pools:
                if demand.speeds.get(pool.kind, 0) and demand.devices + used.get(pool.kind, 0) <= pool.count:
                    need = (demand.memory_bytes or {}).get(pool.kind)
                    assert need is not None
                    assert need > pool.memory_bytes
    if then == "again":
        again = allocate(demands, pools, **asked)
        assert (again.placements, again.score, again.bound) == (plan.placements, plan.score, plan.bound)
    if then == "kept":
        kept = allocate(demands, pools, **asked, last=plan)
        check_promises(kept, demands, pools, margin)
        assert kept.solver == "kept" or not plan.placements or restart_cost_s > 0
    if then == "greedy":
        greedy = allocate(demands, pools, **asked, time_limit_s=0)
        check_promises(greedy, demands, pools, margin)
        assert greedy.solver == "greedy"
    checked["promises"] += 1


@settings(max_examples=EXAMPLES // 2, deadline=None)
@given(fleets(4, 2, 3), st.randoms(use_true_random=False))
def test_small_choices_are_the_best_of_all(fleet, draw):
    demands, pools, pairs = fleet
    groups = group(demands, pools)
    shares = share(demands, pools, groups, pairs, 0.0, range(len(groups.first)))
    worth = np.array([[d.speeds.get(p.kind, 0) * draw.uniform(0.1, 9) for p in pools] for d in demands])
    worth = worth.reshape(len(demands), len(pools))
    devices = np.array([d.devices for d in demands], np.int64)
    counts = np.array([p.count for p in pools], np.int64)
    nobody = np.full(len(demands), -1)
    market = Market(worth, devices, counts, groups, shares, deciding.Homes(0.0, nobody, nobody))
    columns = singles(worth, devices, counts).join(
        PairColumns(worth, devices, groups, shares, market.homes).listed()
    )
    rows = [
        (
            columns.worth[c],
            columns.kind[c],
            columns.devices[c],
            (columns.a[c], columns.b[c])[: 1 + (columns.b[c] >= 0)],
        )
        for c in range(len(columns))
    ]
    want = best_by_trying(rows, counts.tolist())
    choice, _ = decide(market, [], time.monotonic() + 60)
    assert choice.worth == pytest.approx(want, rel=1e-6)
    assert choice.bound >= want * (1 - 1e-6)
    checked["best of all"] += 1


@settings(max_examples=EXAMPLES // 2, deadline=None)
@given(fleets(6, 1, 4))
def test_one_kind_ends_when_mcnaughton_says(fleet):
    """On equal devices and without sharing, the soonest end is known: the longest job, or the mean load."""
    demands, pools, _ = fleet
    pools = [pool for pool in pools if pool.count > 0]
    demands = [d for d in demands if pools and d.devices == 1 and d.speeds.get(pools[0].kind, 0) > 0]
    groups = group(demands, pools)
    shares = share(demands, pools, groups, None, 0.0, [])
    speeds = np.array([[d.speeds.get(p.kind, 0.0) for p in pools] for d in demands]).reshape(
        -1, max(1, len(pools))
    )
    steps = np.array([d.remaining_steps for d in demands])
    counts = np.array([p.count for p in pools] or [0], np.int64)
    end = shortest_end(speeds, steps, np.ones(len(demands), np.int64), counts, groups, shares).end_s
    times = steps / speeds[:, 0] if len(demands) else np.zeros(1)
    want = max(times.max(), times.sum() / max(1, counts[0]))
    assert end == pytest.approx(want, rel=1e-6)
    checked["soonest end"] += 1
