"""The simulator: Gavel's rounds and rules on tables small enough to follow by hand."""

import pytest

from shoestring.errors import FleetError
from shoestring.fleet.allocate.plan import Demand, Placement, Plan, Pool
from shoestring.fleet.simulate.simulator import Settings, simulate
from shoestring.fleet.simulate.throughputs import parse_throughputs
from shoestring.fleet.simulate.trace import TraceJob
from tests.unit.fleet.simulate.drawing import draw_trace

TABLE = parse_throughputs(
    {
        "fast": {
            "('A', 1)": {"null": 10.0, "('A', 1)": [8.0, 8.0], "('B', 1)": [9.0, 3.0]},
            "('B', 1)": {"null": 4.0, "('A', 1)": [3.0, 9.0], "('B', 1)": [1.0, 1.0]},
            "('A', 2)": {"null": 18.0, "('A', 2)": [12.0, 12.0]},
        },
        "slow": {
            "('A', 1)": {"null": 1.0, "('A', 1)": [0.4, 0.4], "('B', 1)": [0.5, 2.0]},
            "('B', 1)": {"null": 3.0, "('A', 1)": [2.0, 0.5], "('B', 1)": [2.0, 2.0]},
            "('A', 2)": {"null": 0.0},
        },
    }
)
ROUND = 100.0


def line(number, steps, work="A", arrival=0.0, devices=1, weight=1.0, deadline=None):
    return TraceJob(number, work, steps, devices, weight, deadline, arrival)


def run(jobs, fast=1, slow=0, watch=None, **settings):
    pools = [Pool("fast", fast, cost_per_hour=3600.0), Pool("slow", slow)]
    return simulate(jobs, TABLE, pools, Settings(round_s=ROUND, **settings), watch=watch)


def test_one_job_alone():
    outcome = run([line(0, 2500)])
    assert outcome.completion_s == {0: 250.0}  # three rounds, the last one short
    assert (outcome.rounds, outcome.starts, outcome.end_s) == (3, 1, 250.0)
    figures = outcome.figures(1)
    assert figures["average_jct_s"] == figures["median_jct_s"] == figures["p99_jct_s"] == 250.0
    assert (figures["makespan_s"], figures["utilisation"], figures["cost"]) == (250.0, 1.0, 250.0)
    assert (figures["jobs"], figures["gap"]) == (1, 0.0)
    assert 0 < figures["decision_ms"] <= figures["decision_ms_max"]


def test_a_job_joins_at_the_next_round_and_counts_from_its_arrival():
    outcome = run([line(0, 2000), line(1, 500, arrival=30.0)])
    # The short one takes the device at 100 and is done at 150; the long one goes on from there.
    assert outcome.completion_s == {1: 120.0, 0: 250.0}
    late = run([line(0, 500, arrival=1000.0), line(1, 500, arrival=5000.0)])
    assert late.completion_s == {0: 50.0, 1: 50.0}
    assert late.figures(1)["utilisation"] == pytest.approx(100 / 4050)


def test_two_that_share_are_done_with_the_later():
    outcome = run([line(0, 600), line(1, 400)], packing=True)
    assert outcome.completion_s == {0: 75.0, 1: 75.0}
    assert (outcome.rounds, outcome.end_s) == (1, 75.0)
    alone = run([line(0, 600), line(1, 400)])
    assert alone.completion_s == {1: 40.0, 0: 100.0}


def test_whole_steps_only():
    table = parse_throughputs({"fast": {"('A', 1)": {"null": 0.125}}})
    pools = [Pool("fast", 1)]
    outcome = simulate([line(0, 25)], table, pools, Settings(round_s=ROUND))
    # 12 steps in a round of 100 s, done after 96 s, when the next begins.
    assert outcome.completion_s == {0: 200.0}
    assert outcome.rounds == 3
    snail = parse_throughputs({"fast": {"('A', 1)": {"null": 0.001}}})
    assert simulate([line(0, 3)], snail, pools, Settings(round_s=ROUND)).completion_s == {0: 3000.0}


def test_starts_cost_and_staying_does_not():
    jobs = [line(0, 2500)]
    outcome = run(jobs, restart_cost_s=40.0)
    assert outcome.completion_s == {0: 290.0}  # lost once
    outcome = run([*jobs, line(1, 500, arrival=50.0)], restart_cost_s=40.0)
    assert outcome.starts == 3  # the long one twice
    assert outcome.completion_s == {1: 140.0, 0: 420.0}


def test_gangs_weights_deadlines():
    outcome = run([line(0, 1800, devices=2), line(1, 10_000)], fast=2)
    assert outcome.completion_s[0] == 100.0
    assert outcome.completion_s[1] == 1100.0
    heavy = run([line(0, 1000), line(1, 900, weight=1.0), line(2, 1000, weight=50.0)])
    assert heavy.completion_s[2] == 100.0
    late = run([line(0, 1000, deadline=50.0), line(1, 1000, deadline=5000.0)])
    assert late.figures(1)["late_jobs"] == 1


def test_only_the_watched_jobs_are_waited_for():
    jobs = [line(0, 1000), line(1, 2000, arrival=10.0), line(2, 10**6, arrival=20.0)]
    outcome = run(jobs, watch=range(2))
    assert set(outcome.completion_s) == {0, 1}
    assert outcome.figures(1, range(1, 2))["average_jct_s"] == outcome.completion_s[1]
    with pytest.raises(FleetError, match="no jobs range"):
        run(jobs, watch=range(5, 9))


@pytest.mark.parametrize("objective", ["jct", "makespan", "fair", "cost", "fifo"])
@pytest.mark.parametrize("packing", [False, True])
def test_every_objective_ends_every_job_and_repeats_itself(objective, packing):
    jobs = [line(n, 300 * (n % 7 + 1), "AB"[n % 2], arrival=40.0 * n) for n in range(20)]
    first, again = (run(jobs, 2, 2, objective=objective, packing=packing) for _ in range(2))
    assert set(first.completion_s) == set(range(20))
    assert first.completion_s == again.completion_s
    assert min(first.completion_s.values()) > 0


def test_no_schedule_ends_before_the_bound():
    from shoestring.fleet.allocate.allocator import allocate

    jobs = draw_trace(TABLE, 16, 5, reference="fast", sizes=((1, 0.8), (2, 0.2)))
    demands = [
        Demand(
            str(j.number),
            j.kind_of_work,
            j.steps,
            TABLE.speeds(j.kind_of_work, j.devices, TABLE.kinds),
            j.devices,
        )
        for j in jobs
    ]
    pools = [Pool("fast", 4), Pool("slow", 4)]
    bound = allocate(demands, pools, objective="makespan", pairs=TABLE).end_s
    for objective in ("makespan", "jct"):
        end = simulate(jobs, TABLE, pools, Settings(objective, True, 7200.0)).end_s
        assert end >= bound * (1 - 1e-9)
        assert objective == "jct" or end <= 1.1 * bound


@pytest.mark.parametrize(
    ("jobs", "kinds", "found"),
    [
        ([], ["fast"], "no jobs to simulate"),
        ([line(0, 1)], ["other"], "no device kind `other`"),
        ([line(0, 1, devices=4)], ["fast"], "job 0 .* runs on no device here"),
        ([line(0, 1, work="C")], ["fast"], "`C` on 1 devices"),
    ],
)
def test_what_cannot_be_simulated_is_refused(jobs, kinds, found):
    with pytest.raises(FleetError, match=found):
        simulate(jobs, TABLE, [Pool(kind, 2) for kind in kinds], Settings())


def test_a_plan_with_more_devices_than_there_are_is_refused(monkeypatch):
    plan = Plan(tuple(Placement("fast", (name,), 1, (10.0,)) for name in "01"))
    monkeypatch.setattr("shoestring.fleet.simulate.simulator.allocate", lambda *_, **__: plan)
    with pytest.raises(FleetError, match="more than the 1 `fast`"):
        run([line(0, 10), line(1, 10)])
