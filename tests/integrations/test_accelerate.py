"""Accelerate, with Shoestring in the place of DistributedDataParallel: the same losses, also when resumed."""

import json

import pytest

from tests.integrations.launch import Example, run_ddp, run_shoestring

EXAMPLE = Example("accelerate_digits")
CLOSE = {"rel": 0, "abs": 1e-4}


def losses(folder):
    return json.loads((folder / "losses.json").read_text())


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Four epochs under DistributedDataParallel and through Shoestring; the last two once more, resumed."""
    folder = tmp_path_factory.mktemp("accelerate")
    script = EXAMPLE.changed(folder)
    run_ddp(EXAMPLE.plain, "--out", folder / "ddp")
    run_shoestring(script, "--out", folder / "own")
    run_shoestring(script, "--out", folder / "resumed", "--resume", folder / "own" / "epoch-2")
    return folder


def test_a_script_changes_in_one_line():
    assert EXAMPLE.changed_lines() == (1, 1)


def test_losses_are_those_of_ddp(runs):
    own = losses(runs / "own")
    assert len(own) == 96
    assert own[-1] < 0.5 < 2 < own[0]
    assert own == pytest.approx(losses(runs / "ddp"), **CLOSE)


def test_a_resumed_run_goes_on_with_the_same_bits(runs):
    assert losses(runs / "resumed") == losses(runs / "own")[48:]


def test_the_model_that_is_saved_is_the_plain_one(runs):
    from safetensors.numpy import load_file

    own, ddp = (load_file(runs / name / "model.safetensors") for name in ("own", "ddp"))
    assert own.keys() == ddp.keys()
    assert "0.weight" in own
