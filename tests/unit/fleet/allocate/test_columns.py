"""Columns of pairs: matched by rank where they are too many to be listed."""

import pytest

from shoestring.fleet.allocate import columns
from shoestring.fleet.allocate.allocator import allocate
from tests.unit.fleet.allocate.fleets import check_promises, draw_fleet


@pytest.mark.parametrize("seed", range(3))
def test_matching_by_rank_bounds_as_listing_does(seed, monkeypatch):
    demands, some, pairs = draw_fleet(seed, 60, 3, 9)
    listed = allocate(demands, some, pairs=pairs)
    monkeypatch.setattr(columns, "EXPAND_UP_TO", 0)
    ranked = allocate(demands, some, pairs=pairs)
    check_promises(ranked, demands, some, 0.1)
    assert ranked.score <= listed.bound * (1 + 1e-9)
    assert listed.score <= ranked.bound * (1 + 1e-9)
    assert ranked.score >= 0.95 * listed.score
