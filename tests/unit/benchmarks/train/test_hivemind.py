"""What the hivemind contestant refuses, and what it says without its library."""

import sys

import pytest
import torch

from benchmarks.train import hivemind
from benchmarks.train.entrant import Place
from shoestring.errors import UsageError


def enter(folder, options, hosts=2):
    model = torch.nn.Linear(2, 1)
    place = Place(0, hosts, ("127.0.0.1",) * hosts, card="lo", port=1, folder=folder)
    return hivemind.enter(place, model, torch.optim.SGD(model.parameters(), lr=0.1), options)


def test_options_left_out_average_in_float16():
    assert hivemind.read_options({}) == hivemind.Options(20, "float16", 3.0)


def test_options_are_taken_over():
    chosen = hivemind.read_options({"sync_every": 1, "compression": "uniform8", "matchmaking_s": 5})
    assert chosen == hivemind.Options(1, "uniform8", 5.0)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"sync_every": 0}, "`sync_every` is 0"),
        ({"sync_every": 1.5}, "sync_every"),
        ({"compression": "float8"}, "`float8`"),
        ({"matchmaking_s": 0}, "`matchmaking_s` is 0"),
        ({"matchmaking_s": 600}, "`matchmaking_s` is 600"),
        ({"batch": 32}, "batch"),
    ],
)
def test_options_that_cannot_be_used_are_named(tmp_path, options, named):
    with pytest.raises(UsageError, match=named):
        enter(tmp_path, options)


def test_one_host_has_nobody_to_average_with(tmp_path):
    with pytest.raises(UsageError, match="two hosts"):
        enter(tmp_path, {}, hosts=1)


def test_missing_library_is_named_with_the_command_that_brings_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "hivemind", None)
    with pytest.raises(UsageError, match="`hivemind`") as error:
        enter(tmp_path, {})
    assert "`make peers`" in error.value.hint
