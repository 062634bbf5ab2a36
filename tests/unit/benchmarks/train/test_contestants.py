"""Contestants run with the settings that the documents name, and only where their package is."""

import dataclasses
import sys

import pytest
import torch

from benchmarks.train.contestants import CONTESTANTS, find_contestant, find_python, find_version
from benchmarks.train.entrant import Place
from benchmarks.train.entrants import hivemind, torchft
from shoestring.errors import UsageError


def test_others_have_the_settings_of_the_documents():
    assert torchft.read_options(CONTESTANTS["torchft-diloco"].options) == torchft.Options(
        "diloco", 20, 0.7, 0.9
    )
    assert torchft.read_options(CONTESTANTS["torchft-local"].options).kind == "local"
    assert hivemind.read_options(CONTESTANTS["hivemind"].options) == hivemind.Options(20, "float16", 3.0)


@pytest.mark.parametrize("module", [hivemind, torchft])
def test_a_missing_library_is_named_with_the_command_that_brings_it(module, tmp_path, monkeypatch):
    name = module.__name__.rpartition(".")[2]
    monkeypatch.setitem(sys.modules, name, None)
    place = Place(0, 2, ("127.0.0.1",) * 2, card="lo", port=1, folder=tmp_path)
    model = torch.nn.Linear(2, 1)
    with pytest.raises(UsageError, match=f"`{name}`") as error:
        module.enter(place, model, torch.optim.SGD(model.parameters(), lr=0.1), {})
    assert "`make peers`" in error.value.hint


def test_a_missing_package_has_a_hint(monkeypatch):
    monkeypatch.setenv("SHOESTRING_PEERS", "/no/such/python")
    absent = dataclasses.replace(CONTESTANTS["ddp"], package="no-such-package")
    with pytest.raises(UsageError, match="not installed") as caught:
        find_python(absent)
    assert "make peers" in caught.value.hint
    assert find_version(CONTESTANTS["ddp"]).startswith("2.")


def test_an_unknown_contestant_is_refused():
    with pytest.raises(UsageError, match="no contestant `horovod`"):
        find_contestant("horovod")
