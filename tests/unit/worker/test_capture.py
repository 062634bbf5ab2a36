"""The state of a training script: taken as arrays and plain data, and brought back."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import shoestring
from shoestring.checkpoint.snapshot import Manifest, Snapshot, commit, step_folder
from shoestring.checkpoint.worker import WorkerState, write_worker
from shoestring.config import Run
from shoestring.errors import SnapshotError, UsageError
from shoestring.model.rules import Rule
from shoestring.model.table import Table, Tensor
from shoestring.observe.events import EventLog
from shoestring.worker import session
from shoestring.worker.capture import ScriptCapture, make_saver
from shoestring.worker.session import Session


class Unsent:
    """Stands for the feedback of pushes."""

    def __init__(self) -> None:
        self.values = {"kept.00000": np.arange(3, dtype=np.float32)}

    def state(self):
        return self.values

    def load(self, state) -> None:
        self.values = state


class Script:
    """A model with a buffer, a frozen and a shared parameter, and a local optimizer with a state."""

    def __init__(self, seed: int, *, worker: int = 0, group: int = 0) -> None:
        torch.manual_seed(seed)
        self.here = Session(
            Run(worker=worker, workers=2, shards=("inproc://nobody",)), 1, EventLog(None, "test")
        )
        self.model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
        self.model[2].weight = self.model[0].weight
        self.model[0].bias.requires_grad_(False)
        trained = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        self.optimizer = torch.optim.Adam(
            [p for _, p in trained], 0.01 * (seed + 1), betas=(0.8, 0.9 + seed / 99)
        )
        self.unsent = Unsent()
        table = Table(tuple(Tensor(name, tuple(p.shape), group) for name, p in trained), Rule("adam"), 1, 0.0)
        self.capture = ScriptCapture(self.here, self.model, self.optimizer, self.unsent, table, is_local=True)

    def step(self) -> None:
        self.model(torch.randn(4, 3)).sum().backward()
        self.optimizer.step()

    def state(self) -> WorkerState:
        state = self.capture.values(7)
        self.capture.add_schedules(state)
        return state


def complete(root: Path, script: Script) -> Snapshot:
    record = write_worker(root, 7, script.here.run.worker, script.state())
    folder = step_folder(root, 7)
    manifest = Manifest(step=7, workers=2, shards=0, facts=script.capture.model_facts(), files=[record])
    commit(folder, manifest)
    return Snapshot(folder)


def assert_same(found: WorkerState, want: WorkerState) -> None:
    assert found.facts() == want.facts()
    assert found.tensors().keys() == want.tensors().keys()
    for name, values in want.tensors().items():
        np.testing.assert_array_equal(found.tensors()[name], values)


def test_a_script_goes_on_as_another_stopped(tmp_path):
    one = Script(0)
    one.step()
    one.unsent.values = {"kept.00000": np.ones(3, np.float32)}
    want = one.state()
    snapshot = complete(tmp_path, one)
    drawn = torch.rand(3)
    other = Script(1)
    other.step()
    other.capture.restore(snapshot)
    found = other.state()
    assert {"0.bias", "1.running_mean", "1.num_batches_tracked"} <= found.buffers.keys()
    assert "0.exp_avg" in found.optimizer
    assert_same(found, want)
    assert torch.equal(torch.rand(3), drawn)
    assert other.optimizer.param_groups[0]["betas"] == (0.8, 0.9)


def test_what_is_taken_does_not_change_with_the_model():
    script = Script(0)
    script.step()
    state = script.state()
    before = {name: values.copy() for name, values in state.tensors().items()}
    script.step()
    for name, values in state.tensors().items():
        np.testing.assert_array_equal(values, before[name])


def test_names_that_share_a_parameter_are_in_the_manifest():
    facts = Script(0).capture.model_facts()
    assert facts["aliases"] == {"2.weight": "0.weight"}
    assert facts["table"][0] == ["0.weight", [3, 3], 0]


def test_a_worker_that_was_not_there_starts_afresh(tmp_path):
    snapshot = complete(tmp_path, Script(0))
    other = Script(1, worker=1)
    before = other.state()
    other.capture.restore(snapshot)
    assert_same(other.state(), before)
    assert other.here.resumed == WorkerState()


def test_another_model_is_refused(tmp_path):
    snapshot = complete(tmp_path, Script(0))
    with pytest.raises(SnapshotError, match="where this model has"):
        Script(0, group=1).capture.restore(snapshot)


def test_a_buffer_of_another_shape_is_refused(tmp_path):
    snapshot = complete(tmp_path, Script(0))
    script = Script(0)
    script.model[1].running_mean = torch.zeros(5)
    with pytest.raises(SnapshotError, match=r"`buffer.1.running_mean` of .* does not fit the model"):
        script.capture.restore(snapshot)


def test_without_a_folder_nothing_is_saved():
    script = Script(0)
    assert make_saver(script.here, script.capture, None, shards=1) is None


@pytest.fixture
def alone():
    here = session.begin(Run())
    yield here
    session.end()


class Counter:
    """Something with a state."""

    def __init__(self, **state: object) -> None:
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state_dict) -> None:
        self.state = state_dict


def test_what_is_kept_is_restored_in_order(alone):
    alone.resumed = WorkerState(stateful=[{"n": 1}, {"n": 2}])
    counters = [Counter(n=0) for _ in range(3)]
    for counter in counters:
        shoestring.keep(counter)
    assert [counter.state for counter in counters] == [{"n": 1}, {"n": 2}, {"n": 0}]
    assert alone.stateful == counters


def test_what_is_kept_must_be_plain_data():
    script = Script(0)
    script.here.stateful.append(Counter(n=object()))
    with pytest.raises(UsageError, match="is not plain data"):
        script.state()
    script.here.stateful[:] = [Counter(n=[1, 2], call=print)]  # what is callable is left out
    assert script.state().stateful == [{"n": [1, 2]}]
