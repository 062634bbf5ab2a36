"""What the torchft contestant refuses, and what it says without its library."""

import sys

import pytest
import torch

from benchmarks.train import torchft
from benchmarks.train.entrant import Place
from shoestring.errors import UsageError


def place(folder) -> Place:
    return Place(host=0, hosts=2, addresses=("127.0.0.1",) * 2, card="lo", port=1, folder=folder)


def enter(folder, options):
    model = torch.nn.Linear(2, 1)
    return torchft.enter(place(folder), model, torch.optim.SGD(model.parameters(), lr=0.1), options)


def test_options_left_out_are_those_of_diloco():
    assert torchft.read_options({}) == torchft.Options("diloco", 20, 0.7, 0.9)


def test_options_are_taken_over():
    chosen = torchft.read_options({"kind": "local", "sync_every": 3, "outer_lr": 1, "outer_momentum": 0.5})
    assert chosen == torchft.Options("local", 3, 1.0, 0.5)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"kind": "ddp"}, "`ddp`"),
        ({"sync_every": 0}, "`sync_every` is 0"),
        ({"sync_every": "often"}, "sync_every"),
        ({"quantised": True}, "quantised"),
        ({"outer_lr": 0.0}, "`outer_lr` 0.0"),
        ({"outer_momentum": 1.0}, "`outer_momentum` 1.0"),
    ],
)
def test_options_that_cannot_be_used_are_named(tmp_path, options, named):
    with pytest.raises(UsageError, match=named):
        enter(tmp_path, options)


def test_the_outer_rule_is_not_asked_of_local():
    assert torchft.read_options({"kind": "local", "outer_lr": 0.0}).outer_lr == 0.0


def test_missing_library_is_named_with_the_command_that_brings_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchft", None)
    with pytest.raises(UsageError, match="`torchft`") as error:
        enter(tmp_path, {})
    assert "`make peers`" in error.value.hint


def test_the_place_to_meet_is_given_by_address():
    handle = '{"id":"7f","store":"some-name:4711","global_rank":1}'
    assert torchft._reachable(handle, "10.0.0.2") == '{"id":"7f","store":"10.0.0.2:4711","global_rank":1}'
