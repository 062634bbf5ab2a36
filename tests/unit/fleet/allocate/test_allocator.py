"""The allocator: decisions where the right one is plain to see, and promises about random fleets."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoestring.errors import FleetError
from shoestring.fleet.allocate.allocator import allocate
from shoestring.fleet.allocate.plan import Demand, Placement, Plan, Pool
from tests.unit.fleet.allocate.fleets import EXAMPLES, TablePairs, check_promises, checked, fleets

GIB = 1 << 30


def job(name, steps=1e4, fast=4.0, slow=1.0, **kwargs):
    return Demand(name, kwargs.pop("work", "w"), steps, {"fast": fast, "slow": slow}, **kwargs)


def pools(fast=1, slow=1, **kwargs):
    return [Pool("fast", fast, **kwargs), Pool("slow", slow, **kwargs)]


def where(plan):
    return {name: place.kind for place in plan.placements for name in place.jobs}


def test_nothing_to_do():
    assert allocate([], []).placements == ()
    assert allocate([], pools()).score == 0
    assert allocate([job("a")], []).waiting == {
        "a": "`a` waits: its speed is not known on any device here; run `shoestring fleet profile a`"
    }


def test_the_fast_device_goes_to_whom_it_helps_most():
    plan = allocate([job("much", fast=8.0), job("little", fast=1.1)], pools())
    assert where(plan) == {"much": "fast", "little": "slow"}
    assert plan.placement_of("much") == Placement("fast", ("much",), 1, (8.0,))
    assert plan.why("much") == "`much` runs on fast: no kind is faster for it"
    others = "jobs that finish sooner or gain more there"
    assert plan.why("little") == f"`little` runs on slow: the only fast, where it is faster, is with {others}"
    assert plan.solver == "highs"
    assert plan.gap == pytest.approx(0, abs=1e-12)


def test_short_jobs_go_first_and_heavy_ones_before():
    demands = [job("long", 1e6), job("short", 4e3)]
    plan = allocate(demands, pools(slow=0))
    assert where(plan) == {"short": "fast"}
    others = "jobs that finish sooner or gain more there"
    assert plan.waiting == {"long": f"`long` waits: the only fast is with {others}; about 1,000 s"}
    heavy = [replace(demands[0], weight=100.0), demands[1]]
    assert where(allocate(heavy, pools(slow=0))) == {"long": "fast"}


def test_who_waits_is_told_who_has_what_and_about_how_long():
    demands = [job(f"j{n}", 1000 * (n + 1), slow=0.0) for n in range(5)]
    plan = allocate(demands, pools(fast=3))
    assert dict(plan.waiting) == {
        f"j{n}": f"`j{n}` waits: all 3 fast are with jobs that finish sooner or gain more there; about {s} s"
        for n, s in ((3, 250), (4, 500))
    }


def test_a_gang_gets_all_its_devices_or_none():
    plan = allocate([job("gang", devices=3), job("one", 1e6)], [Pool("fast", 2), Pool("slow", 3)])
    assert where(plan) == {"gang": "slow", "one": "fast"}
    plan = allocate([job("gang", devices=3)], [Pool("fast", 2), Pool("slow", 2)])
    assert plan.waiting == {
        "gang": "`gang` waits: it needs 3 devices of one kind at once, and it could use 2 at most"
    }


PAIRS = TablePairs({("w", "w", "fast"): (0.8, 0.8), ("w", "w", "slow"): (0.55, 0.55)})


def test_two_share_where_it_pays():
    demands = [job("a"), job("b")]
    plan = allocate(demands, pools(slow=0), pairs=PAIRS)
    assert plan.placements == (Placement("fast", ("a", "b"), 1, (3.2, 3.2)),)
    assert plan.why("a") == "`a` shares fast with `b`: 3.2 of its 4 steps/s alone"
    assert len(allocate(demands, pools(slow=0)).placements[0].jobs) == 1
    worse = TablePairs({("w", "w", "fast"): (0.5, 0.5)})
    assert not allocate(demands, pools(slow=0), pairs=worse).placements[0].is_packed
    other_sizes = [job("a"), job("b", devices=2)]
    assert not any(p.is_packed for p in allocate(other_sizes, pools(2, 0), pairs=PAIRS).placements)


@pytest.mark.parametrize(
    ("needs", "have", "margin", "is_packed"),
    [
        ((4, 5), 10, 0.1, True),
        ((5, 5), 10, 0.1, False),
        ((5, 5), 10, 0.0, True),
        ((5, 6), 10, 0.0, False),
        ((None, 1), 10, 0.0, False),  # who knows
        ((None, None), None, 0.5, True),  # no figures at all: what can share is up to `pairs`
    ],
)
def test_memory_is_never_exceeded(needs, have, margin, is_packed):
    demands = [
        job(name, memory_bytes=None if need is None else {"fast": need * GIB})
        for name, need in zip("ab", needs, strict=True)
    ]
    pool = Pool("fast", 1, None if have is None else have * GIB)
    plan = allocate(demands, [pool], pairs=PAIRS, memory_margin=margin)
    assert plan.placements[0].is_packed == is_packed


def test_a_job_larger_than_every_device_waits_and_says_so():
    big = job("big", memory_bytes={"fast": 20 * GIB, "slow": 18 * GIB})
    plan = allocate([big], pools(memory_bytes=16 * GIB))
    assert plan.why("big") == (
        "`big` waits: it needs 18.0 GiB on a device, and the largest it could use has 16.0 GiB"
    )


def test_deadlines_that_can_just_be_met_come_first():
    short, late = job("short", 400), job("late", 4e5, deadline_s=1.004e5)
    assert where(allocate([short, late], pools(slow=0))) == {"late": "fast"}
    relaxed = replace(late, deadline_s=1e6)
    assert where(allocate([short, relaxed], pools(slow=0))) == {"short": "fast"}
    lost = replace(late, deadline_s=10.0)  # not to be met: no reason to hurry
    assert where(allocate([short, lost], pools(slow=0))) == {"short": "fast"}


def test_a_job_is_not_moved_for_nothing():
    home = [job("a", fast=1.05, running_on="slow")]
    assert where(allocate(home, pools())) == {"a": "fast"}
    plan = allocate(home, pools(), restart_cost_s=120.0)
    assert where(plan) == {"a": "slow"}
    assert "moving to fast would cost more than it gains" in plan.why("a")
    away = [job("a", fast=4.0, running_on="slow")]
    assert where(allocate(away, pools(), restart_cost_s=120.0)) == {"a": "fast"}


def test_pairs_that_run_stay_together():
    demands = [job(name, 1e5 + at, running_on="fast") for at, name in enumerate("abcd")]
    together = (("a", "d"), ("b", "c"))
    last = Plan(tuple(Placement("fast", both, 1, (3.2, 3.2)) for both in together))
    plan = allocate(demands, pools(2, 0), pairs=PAIRS, restart_cost_s=60.0, last=last)
    assert {frozenset(place.jobs) for place in plan.placements} == {frozenset(both) for both in together}


def test_the_last_plan_stands_when_nothing_is_better():
    demands = [job("a"), job("b")]  # alike: which of them gets the fast device is all the same
    last = Plan((Placement("slow", ("a",), 1, (1.0,)), Placement("fast", ("b",), 1, (4.0,))))
    plan = allocate(demands, pools(), last=last)
    assert (plan.solver, where(plan)) == ("kept", {"a": "slow", "b": "fast"})
    gone = Plan(
        (*last.placements, Placement("lost", ("c",), 1, (1.0,)), Placement("fast", ("d",), 1, (1.0,)))
    )
    assert where(allocate(demands, pools(), last=gone)) == {"a": "slow", "b": "fast"}
    bad = Plan((Placement("slow", ("a",), 1, (1.0,)),))  # leaves the fast device idle: filled up
    assert where(allocate(demands, pools(), last=bad)) == {"a": "slow", "b": "fast"}
    worse = Plan((Placement("slow", ("a",), 1, (1.0,)),))
    assert where(allocate(demands[:1], pools(), last=worse)) == {"a": "fast"}


def test_greedy_when_there_is_no_time_and_the_last_plan_if_that_is_better():
    # Alone `a` is worth most on `fast`; the best plan gives `fast` to `b`, who cannot use `slow`.
    a = job("a", fast=4.0, slow=3.9)
    b = Demand("b", "w", 1.05e4, {"fast": 4.0})
    best = allocate([a, b], pools())
    assert where(best) == {"a": "slow", "b": "fast"}
    greedy = allocate([a, b], pools(), time_limit_s=0)
    assert (greedy.solver, greedy.bound, where(greedy)) == ("greedy", None, {"a": "fast"})
    kept = allocate([a, b], pools(), time_limit_s=0, last=best)
    assert (kept.solver, where(kept)) == ("kept", where(best))
    for objective in ("makespan", "fair", "cost"):
        assert allocate([a, b], pools(), objective=objective, time_limit_s=0).solver == "greedy"


def test_makespan_starts_the_long_job_at_once():
    demands = [job("long", 4e4), *(job(f"s{n}", 1e3) for n in range(9))]
    plan = allocate(demands, pools(slow=0), objective="makespan")
    assert plan.end_s == pytest.approx((4e4 + 9e3) / 4)
    two = allocate(demands, pools(2, 0), objective="makespan")
    assert where(two)["long"] == "fast"
    assert two.end_s == pytest.approx(1e4)  # the long job alone takes that long
    assert allocate(demands, pools(2, 0)).end_s is None


def test_fair_runs_who_had_least():
    demands = [job("had", 10, served=0.9), job("not", 1e6, served=0.1)]
    plan = allocate(demands, pools(slow=0), objective="fair")
    assert where(plan) == {"not": "fast"}
    assert "had less of their share" in plan.why("had")


def test_cost_waits_for_the_cheap_device():
    dear = [Pool("fast", 1, cost_per_hour=8.0), Pool("slow", 1, cost_per_hour=1.0)]
    demands = [job("a"), job("b")]  # four times as fast for eight times the price
    plan = allocate(demands, dear, objective="cost")
    assert list(where(plan).values()) == ["slow"]
    (why,) = plan.waiting.values()
    assert "the free fast cost too much" in why
    fair = [Pool("fast", 1, cost_per_hour=4.0), Pool("slow", 1, cost_per_hour=1.0)]
    assert sorted(where(allocate(demands, fair, objective="cost")).values()) == ["fast", "slow"]


@pytest.mark.parametrize(
    ("kwargs", "found"),
    [
        ({"objective": "luck"}, "no objective `luck`"),
        ({"memory_margin": 1.0}, "memory margin is 1.0"),
        ({"restart_cost_s": -1.0}, "restart cost is -1.0"),
        ({"round_s": 0.0}, "a round is 0.0"),
    ],
)
def test_wrong_questions_are_refused(kwargs, found):
    with pytest.raises(FleetError, match=found):
        allocate([job("a")], pools(), **kwargs)


OBJECTIVES = st.sampled_from(["jct", "makespan", "fair", "cost"])


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
