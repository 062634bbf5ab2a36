"""Real races on this machine, and what is refused before a figure counts."""

import dataclasses

import msgspec
import pytest

from benchmarks.train.contestants import CONTESTANTS
from benchmarks.train.race import Entry, are_equal, check, race
from benchmarks.train.trainer import Result
from benchmarks.train.workloads import WORKLOADS
from shoestring.bench.link.hosts import connected
from shoestring.errors import ShoestringError

GPT = WORKLOADS["gpt"]
END = Result([1.0] * 4, [1.0] * 4, [0] * 4, 0.1, [], "same", 100.0, {})


def start(name: str, rate: float = 1e-3) -> Entry:
    return Entry(CONTESTANTS[name], GPT, 0, rate, 4)


@pytest.mark.parametrize("name", ["ddp", "shoestring-local"])
def test_contestants_train(name):
    with connected("loopback") as hosts:
        results = race(start(name), hosts, 2, 120)
    assert [len(result.losses) for result in results] == [4, 4]
    assert are_equal(results)
    assert results[0].losses[-1] < results[0].losses[0]
    assert results[0].ends_s == sorted(results[0].ends_s)
    assert all(result.compute_s > 0 for result in results)
    if name == "shoestring-local":
        facts = results[0].facts
        assert facts["policy"] == "local:4"
        assert facts["codecs_used"] == [facts["codec"]]


def test_a_trainer_that_fails_says_why_and_gives_no_result():
    broken = dataclasses.replace(CONTESTANTS["ddp"], options={"hook": "magic"})
    with (
        connected("loopback") as hosts,
        pytest.raises(ShoestringError, match="failed with exit code") as caught,
    ):
        race(dataclasses.replace(start("ddp"), contestant=broken), hosts, 2, 120)
    assert "no hook `magic`" in caught.value.hint


def other(**changes) -> list[Result]:
    """The results of two hosts, the second with these changes."""
    return [END, msgspec.structs.replace(END, **changes)]


@pytest.mark.parametrize(
    ("name", "changes", "problem"),
    [
        ("ddp", {"losses": [1.0, None, 1.0, 1.0]}, "no numbers"),
        ("ddp", {"losses": [1.0] * 3}, "no numbers"),
        ("ddp", {"energy": None}, "no numbers"),
        ("ddp", {"energy": 100.2}, "different parameters"),
        ("shoestring-local", {"digest": "other"}, "different parameters"),
    ],
)
def test_what_did_not_train_alike_is_no_result(name, changes, problem):
    with pytest.raises(ShoestringError, match=problem):
        check(start(name), other(**changes))


def test_replicas_of_others_may_differ_by_rounding_and_between_exchanges():
    check(start("ddp"), other(digest="other", energy=100.05))
    check(start("shoestring-local"), other())
    check(start("torchft-diloco"), other(digest="other", energy=200.0))  # exchanged every 20 steps
