"""What a race's steps come to: time, bytes, and when the target was reached."""

import dataclasses

import pytest

from benchmarks.train.contestants import CONTESTANTS
from benchmarks.train.race import Entry
from benchmarks.train.standing import rank, steps_to_target, timed_steps, transfer
from benchmarks.train.trainer import Result
from benchmarks.train.workloads import WORKLOADS
from shoestring.errors import ShoestringError

CONV = dataclasses.replace(WORKLOADS["conv"], steps=40, target=80.0)
GPT = dataclasses.replace(WORKLOADS["gpt"], target=2.0)


def result(steps: int, *, step_s: float = 0.5, sent: int = 100, losses=None, scores=(), digest="a") -> Result:
    return Result(
        losses=losses or [1.0 / step for step in range(1, steps + 1)],
        ends_s=[step_s * step for step in range(1, steps + 1)],
        sent_bytes=[1000 + sent * step for step in range(1, steps + 1)],
        compute_s=0.2,
        scores=list(scores),
        digest=digest,
        energy=1.0,
        facts={"hook": "none"},
    )


def entry(name: str, steps: int) -> Entry:
    return Entry(CONTESTANTS[name], CONV, 0, 0.1, steps)


@pytest.mark.parametrize(
    ("workload", "scores", "want"),
    [
        (CONV, [(10, 70.0), (20, 90.0)], 15.0),
        (CONV, [(10, 80.0), (20, 90.0)], 10.0),
        (CONV, [(10, 70.0), (20, 79.9)], None),
        (GPT, [(10, 2.5), (20, 2.1), (30, 1.9)], 25.0),
        (GPT, [], None),
    ],
)
def test_the_target_is_reached_on_the_line_between_two_scores(workload, scores, want):
    found = steps_to_target(workload, scores)
    assert found == (None if want is None else pytest.approx(want))


def test_a_whole_run_gives_its_own_figures():
    results = [result(40, scores=[(20, 70.0), (40, 90.0)]), result(40, digest="b")]
    row = rank(entry("ddp", 40), "loopback", results, results, cards=1)
    assert (row.final, row.steps_to_target, row.is_whole, row.are_equal) == (90.0, 30.0, True, False)
    assert row.seconds_total == 20.0
    assert row.seconds_to_target == pytest.approx(15.0)
    assert row.step_ms == pytest.approx(500.0)
    assert row.exposed_comm_s == pytest.approx(40 * 0.3)
    assert row.bytes_total == 1000 + 40 * 100  # of the one card that all hosts share


def test_some_steps_on_a_link_stand_for_all():
    course = [result(40, step_s=0.1, scores=[(20, 70.0), (40, 90.0)])] * 2
    row = rank(entry("ddp", 16), "100mbit-10ms", [result(16, step_s=2.0, sent=7)] * 2, course, cards=2)
    assert (row.final, row.is_whole) == (90.0, False)
    assert row.seconds_total == pytest.approx(80.0)
    assert row.seconds_to_target == pytest.approx(60.0)
    assert row.bytes_total == 2 * (1000 + 40 * 7)


def test_what_a_step_takes_on_a_link_holds_for_other_seeds():
    course = [result(40, step_s=0.1, scores=[(20, 70.0), (40, 90.0)])] * 2
    timed = rank(entry("ddp", 16), "100mbit-10ms", [result(16, step_s=2.0, sent=7)] * 2, course, cards=2)
    other = [result(40, scores=[(20, 80.0), (40, 85.0)], digest=digest) for digest in "ab"]
    row = transfer(timed, CONV, 3, other)
    assert (row.seed, row.timed_seed) == (3, 0)
    assert (row.final, row.steps_to_target, row.are_equal) == (85.0, 20.0, False)
    assert row.seconds_to_target == pytest.approx(40.0)
    assert (row.seconds_total, row.bytes_total) == (timed.seconds_total, timed.bytes_total)


def test_other_losses_than_in_the_full_run_are_refused():
    course = [result(40, scores=[(40, 90.0)])]
    other = result(16, losses=[1.0] * 16)
    with pytest.raises(ShoestringError, match="at step 2"):
        rank(entry("ddp", 16), "100mbit-10ms", [other], course, cards=1)


def test_what_follows_the_link_may_have_other_losses():
    course = [result(40, scores=[(40, 90.0)])]
    other = result(40, losses=[1.0] * 40, scores=[(40, 85.0)])
    row = rank(entry("shoestring-auto", 40), "100mbit-10ms", [other], course, cards=1)
    assert (row.final, row.is_whole) == (85.0, True)


@pytest.mark.parametrize("name", CONTESTANTS)
def test_whole_periods_are_timed(name):
    own = Entry(CONTESTANTS[name], WORKLOADS["conv"], 0, 0.1, 1200)
    steps = timed_steps(own, 60)
    assert steps % own.contestant.period == 0
    assert steps >= 60 + 8
    assert steps >= 3 * own.contestant.period


def test_too_few_steps_cannot_be_timed():
    with pytest.raises(ShoestringError, match="too few"):
        rank(entry("ddp", 8), "loopback", [result(8)], [result(8)], cards=0)
