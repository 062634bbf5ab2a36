"""Transformers' Trainer, with Shoestring in the place of DistributedDataParallel.

Its losses, gradient norms and evaluations are those of its own way, also when resumed.
"""

import json

import accelerate
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from shoestring.errors import UsageError
from shoestring.integrations.transformers import ShoestringCallback
from tests.integrations.launch import Example, run_ddp, run_shoestring, told_of_two

EXAMPLE = Example("trainer_digits")
LOGGED = ("loss", "grad_norm", "learning_rate", "eval_loss")


def logged(folder):
    """What the Trainer has logged, by step and name."""
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return {(entry["step"], name): entry[name] for entry in history for name in LOGGED if name in entry}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """24 steps under DistributedDataParallel and through Shoestring; the last 8 once more, resumed."""
    folder = tmp_path_factory.mktemp("transformers")
    script = EXAMPLE.changed(folder)
    run_ddp(EXAMPLE.plain, "--out", folder / "ddp")
    run_shoestring(script, "--out", folder / "own")
    run_shoestring(script, "--out", folder / "resumed", "--resume", folder / "own" / "checkpoint-16")
    return folder


def test_a_script_changes_in_two_lines():
    assert EXAMPLE.changed_lines() == (0, 2)


def test_losses_norms_and_evaluations_are_those_of_ddp(runs):
    own = logged(runs / "own")
    assert len(own) == 24 * 3 + 2
    assert own[24, "loss"] < 2 < 2.8 < own[1, "loss"]
    assert own == logged(runs / "ddp")


def test_a_resumed_run_goes_on_with_the_same_bits(runs):
    assert logged(runs / "resumed") == logged(runs / "own")


def test_the_model_that_is_saved_is_loaded_as_any_other(runs):
    own, ddp = (AutoModelForCausalLM.from_pretrained(runs / name) for name in ("own", "ddp"))
    assert type(own) is type(ddp)
    for one, other in zip(own.parameters(), ddp.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.fixture
def callback(monkeypatch):
    """A callback, whose reach ends with the test."""
    monkeypatch.setattr(accelerate.Accelerator, "prepare_model", accelerate.Accelerator.prepare_model)
    return ShoestringCallback()


def test_a_trainer_that_counts_other_processes_is_refused(callback, monkeypatch, tmp_path):
    arguments = TrainingArguments(str(tmp_path), report_to="none")
    told_of_two(monkeypatch)
    with pytest.raises(UsageError, match=r"worker 1 of 2, but to the Trainer process 0 of 1.*use_cpu=True"):
        Trainer(nn.Linear(2, 2), arguments, callbacks=[callback])


def test_a_model_that_was_prepared_otherwise_is_refused(callback):
    with pytest.raises(UsageError, match="otherwise than by Shoestring"):
        callback.on_train_begin(None, None, None, model=nn.Linear(2, 2))
