"""`python -m benchmarks.fleet`: what is drawn is the same each time, and a broken plan is not timed."""

import json
from dataclasses import replace

import pytest

from benchmarks.fleet import decisions as fleet
from benchmarks.fleet.__main__ import main
from shoestring.errors import FleetError
from shoestring.fleet.allocate.allocator import allocate
from shoestring.fleet.allocate.plan import Plan


def test_fleets_are_drawn_alike():
    demands, pools, pairs = fleet.draw_fleet(40, 22, seed=1)
    assert (demands, pools) == fleet.draw_fleet(40, 22, seed=1)[:2]
    assert demands != fleet.draw_fleet(40, 22, seed=2)[0]
    assert [pool.count for pool in pools] == [5, 5, 4, 4, 4]
    one, other = pairs.together(demands[0], demands[1], "v100")
    assert 0 < one < demands[0].speeds["v100"]
    assert 0 < other < demands[1].speeds["v100"]


def test_broken_plans_are_refused():
    demands, pools, pairs = fleet.draw_fleet(30, 20, seed=0)
    plan = allocate(demands, pools, pairs=pairs)
    fleet.check(plan, demands, pools)
    place = plan.placements[0]
    broken = {
        "name every job once": Plan(plan.placements[1:], plan.waiting, plan.reasons),
        "gives out": replace(plan, placements=tuple(replace(p, kind=place.kind) for p in plan.placements)),
        "got 99 devices": replace(plan, placements=(*plan.placements[1:], replace(place, devices=99))),
    }
    for found, wrong in broken.items():
        with pytest.raises(FleetError, match=found if "99" not in found else "gives out|got 99"):
            fleet.check(wrong, demands, pools)
    tight = [replace(pool, memory_bytes=1) for pool in pools]
    with pytest.raises(FleetError, match="bytes"):
        fleet.check(plan, demands, tight)


def test_command(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(fleet, "QUICK", ((20, 10),))
    file = tmp_path / "fleet.json"
    with pytest.raises(SystemExit) as left:
        main(["--quick", "--seeds", "1", "--json", "--output", str(file)])
    out, err = capsys.readouterr()
    assert left.value.code == 0
    result = json.loads(out)
    assert json.loads(file.read_text()) == result
    (row,) = result["rows"]
    assert (row["jobs"], row["devices"], row["kinds"], row["objective"]) == (20, 10, 5, "jct")
    assert 0 < row["decision_s"] <= row["decision_s_max"]
    assert 0 <= row["gap"] <= row["gap_max"] < 0.3
    assert "deciding for 20 jobs on 10 devices" in err
    with pytest.raises(SystemExit):
        main(["--quick", "--seeds", "1"])
    assert "20 jobs" in capsys.readouterr().out
