"""Real races: processes that train together on this machine."""

import dataclasses

import pytest

from benchmarks.train.contestants import CONTESTANTS, find_contestant, find_python, find_version
from benchmarks.train.race import Entry, are_equal, race
from benchmarks.train.workloads import WORKLOADS
from shoestring.bench.link.hosts import connected
from shoestring.errors import ShoestringError, UsageError

GPT = WORKLOADS["gpt"]


def start(name: str, steps: int = 4, rate: float = 1e-3) -> Entry:
    return Entry(CONTESTANTS[name], GPT, 0, rate, steps)


@pytest.mark.parametrize("name", ["ddp", "shoestring-every", "shoestring-local"])
def test_contestants_train(name):
    with connected("loopback") as hosts:
        results = race(start(name), hosts, 2, 120)
    assert [len(result.losses) for result in results] == [4, 4]
    assert are_equal(results)
    assert results[0].losses[-1] < results[0].losses[0]
    assert results[0].ends_s == sorted(results[0].ends_s)
    assert all(result.compute_s > 0 for result in results)


def test_ours_says_what_it_used():
    with connected("loopback") as hosts:
        facts = race(start("shoestring-local"), hosts, 2, 120)[0].facts
    assert facts["policy"] == "local:4"
    assert facts["codecs_used"] == [facts["codec"]]


def test_a_trainer_that_fails_says_why():
    broken = dataclasses.replace(CONTESTANTS["ddp"], options={"hook": "magic"})
    with (
        connected("loopback") as hosts,
        pytest.raises(ShoestringError, match="failed with exit code") as caught,
    ):
        race(Entry(broken, GPT, 0, 1e-3, 4), hosts, 2, 120)
    assert "no hook `magic`" in caught.value.hint


def test_a_loss_that_is_no_number_is_no_result():
    with connected("loopback") as hosts, pytest.raises(ShoestringError, match="no numbers"):
        race(start("ddp", rate=1e30), hosts, 2, 120)


def test_a_package_that_is_missing_has_a_hint(monkeypatch):
    monkeypatch.setenv("SHOESTRING_PEERS", "/no/such/python")
    absent = dataclasses.replace(CONTESTANTS["ddp"], package="no-such-package")
    with pytest.raises(UsageError, match="not installed") as caught:
        find_python(absent)
    assert "make peers" in caught.value.hint
    assert find_version(CONTESTANTS["ddp"]).startswith("2.")


def test_an_unknown_contestant_is_refused():
    with pytest.raises(UsageError, match="no contestant `horovod`"):
        find_contestant("horovod")
