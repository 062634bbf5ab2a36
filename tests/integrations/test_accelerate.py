"""Accelerate, with Shoestring in the place of DistributedDataParallel: the same losses, also when resumed."""

import json

import pytest
import torch
from accelerate.state import AcceleratorState
from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs
from safetensors.numpy import load_file
from torch import nn

from shoestring.errors import UsageError
from shoestring.integrations.accelerate import Accelerator
from shoestring.worker.module.shell import is_wrapped
from tests.integrations.launch import ROOT, Example, run_ddp, run_shoestring, told_of_two

EXAMPLE = Example("accelerate_digits")


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
    assert own == losses(runs / "ddp")


def test_a_resumed_run_goes_on_with_the_same_bits(runs):
    assert losses(runs / "resumed") == losses(runs / "own")[48:]


def test_the_model_that_is_saved_is_the_plain_one(runs):
    own, ddp = (load_file(runs / name / "model.safetensors") for name in ("own", "ddp"))
    assert own.keys() == ddp.keys()
    assert "0.weight" in own


def test_all_else_is_as_with_accelerates_own(tmp_path):
    output = run_shoestring(ROOT / "tests" / "integrations" / "rivals.py", folder=tmp_path)
    assert sorted(line[-9:] for line in output.splitlines() if "equal on worker" in line) == [
        " worker 0",
        " worker 1",
    ]


# One process, a run of its own.


@pytest.fixture
def accelerator():
    """Makes our `Accelerator`, for a process that Accelerate knows nothing of yet."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield Accelerator
    AcceleratorState._reset_state(reset_partial_state=True)


def test_a_model_is_wrapped_to_be_trained_and_once(accelerator):
    here = accelerator(cpu=True)
    model = nn.Linear(2, 2)
    assert not is_wrapped(here.prepare_model(model, evaluation_mode=True))
    assert not is_wrapped(here.prepare(nn.Linear(2, 2).requires_grad_(False)))
    assert is_wrapped(here.prepare(model))
    assert here.prepare(model) is model


def test_a_compiled_model_is_wrapped_inside(accelerator):
    here = accelerator(cpu=True, dynamo_backend="eager")
    model = nn.Linear(2, 2)
    compiled = here.prepare(model)
    assert compiled._orig_mod is model
    assert is_wrapped(model)
    compiled(torch.ones(1, 2)).sum().backward()
    assert model.weight.grad is not None
    assert here.unwrap_model(compiled, keep_torch_compile=False) is model


def test_what_only_ddp_can_do_is_refused(accelerator):
    handler = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16)
    here = accelerator(cpu=True, kwargs_handlers=[handler])
    with pytest.raises(UsageError, match="communication hook.*`--codec float16`"):
        here.prepare(nn.Linear(2, 2))
    with pytest.raises(UsageError, match="leave the last forward pass out"):
        here.trigger_sync_in_backward(nn.Linear(2, 2))
    with pytest.raises(UsageError, match="leave `even_batches` on"):
        here.join_uneven_inputs([], even_batches=False)
    with here.join_uneven_inputs([]):
        pass


def test_an_accelerator_that_counts_other_processes_is_refused(accelerator, monkeypatch):
    here = accelerator(cpu=True)
    told_of_two(monkeypatch)
    with pytest.raises(UsageError, match=r"worker 1 of 2, but to Accelerate process 0 of 1.*cpu=True"):
        here.prepare(nn.Linear(2, 2))
