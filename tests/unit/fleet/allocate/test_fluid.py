"""The soonest end of all jobs, where a formula tells it."""

import numpy as np
import pytest
from hypothesis import given, settings

from shoestring.fleet.allocate.fluid import shortest_end
from shoestring.fleet.allocate.pairing import group, share
from tests.unit.fleet.allocate.fleets import EXAMPLES, checked, fleets


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
