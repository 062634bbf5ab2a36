"""Choices: the best of all for small fleets, near the whole for large ones that are decided in parts."""

import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoestring.fleet.allocate import decide as deciding
from shoestring.fleet.allocate.allocator import allocate
from shoestring.fleet.allocate.columns import Homes, PairColumns, singles
from shoestring.fleet.allocate.decide import Market, decide
from shoestring.fleet.allocate.pairing import group, share
from tests.unit.fleet.allocate.fleets import (
    EXAMPLES,
    best_by_trying,
    check_promises,
    checked,
    draw_fleet,
    fleets,
)


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
    market = Market(worth, devices, counts, groups, shares, Homes(0.0, nobody, nobody))
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


@pytest.mark.parametrize("seed", range(4))
def test_a_large_fleet_in_parts_is_near_the_whole(seed, monkeypatch):
    demands, some, pairs = draw_fleet(seed, 300, 3, 5)
    some = [replace(pool, count=40) for pool in some]
    whole = allocate(demands, some, pairs=pairs)
    monkeypatch.setattr(deciding, "PART_JOBS", 200)
    monkeypatch.setattr(deciding, "_PART_SIZE", 100)
    parts = allocate(demands, some, pairs=pairs)
    for plan in (whole, parts):
        check_promises(plan, demands, some, 0.1)
        assert plan.score <= plan.bound * (1 + 1e-9)
    assert parts.placements != whole.placements
    assert parts.score >= 0.9 * whole.score
    # Each bound holds for every choice, so for that of the other too.
    assert parts.score <= whole.bound * (1 + 1e-9)
    assert whole.score <= parts.bound * (1 + 1e-9)
