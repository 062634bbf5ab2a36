"""A worker's file of a checkpoint, written and read back."""

import numpy as np
import pytest

from shoestring.checkpoint.snapshot import FileRecord, Manifest, Snapshot, commit, step_folder
from shoestring.checkpoint.worker import (
    RandomState,
    WorkerState,
    WorkerWriter,
    read_worker,
    write_worker,
)
from shoestring.errors import SnapshotError

STATE = WorkerState(
    steps=12,
    position=(2, 3),
    places=[(2, 3), (4, 0)],
    random=RandomState({"torch": np.arange(5, dtype=np.uint8)}, {"python": [3, None]}),
    buffers={"norm.running_mean": np.arange(4, dtype=np.float32)},
    feedback={"kept.00000": np.ones(7, np.float32), "weights": np.array([1.0])},
    optimizer={"0.exp_avg": np.full(3, 0.5, np.float32), "0.step": np.array(12.0)},
    shares=[[0, 4, 4]],
    groups=[{"lr": 0.1, "betas": [0.9, 0.99]}],
    stateful=[{"last_epoch": 12}],
)


def complete(root, *files: FileRecord) -> Snapshot:
    folder = step_folder(root, 12)
    commit(folder, Manifest(step=12, workers=2, shards=0, facts={}, files=list(files)))
    return Snapshot(folder)


def assert_same(found: dict, want: dict) -> None:
    assert found.keys() == want.keys()
    for name, values in want.items():
        assert found[name].dtype == values.dtype
        np.testing.assert_array_equal(found[name], values)


def test_each_worker_finds_its_own_state(tmp_path):
    other = WorkerState(steps=13)
    records = [write_worker(tmp_path, 12, worker, state) for worker, state in enumerate([other, STATE])]
    snapshot = complete(tmp_path, *records)
    found = read_worker(snapshot, 1)
    assert_same(found.tensors(), STATE.tensors())
    for name in ("buffers", "feedback", "optimizer"):
        assert_same(getattr(found, name), getattr(STATE, name))
    assert_same(found.random.generators, STATE.random.generators)
    assert (found.facts(), found.position, found.places) == (STATE.facts(), STATE.position, STATE.places)
    assert read_worker(snapshot, 0).steps == 13
    assert read_worker(snapshot, 2) is None


def test_names_are_those_that_checkpoints_have_had_all_along(tmp_path):
    record = write_worker(tmp_path, 12, 1, STATE)
    assert record.name == "worker-1.safetensors"
    assert [tensor.name for tensor in record.tensors] == [
        "worker.1.random.torch",
        "worker.1.buffer.norm.running_mean",
        "worker.1.kept.00000",
        "worker.1.weights",
        "worker.1.optimizer.0.exp_avg",
        "worker.1.optimizer.0.step",
    ]
    assert list(record.facts.items()) == [
        ("worker", 1),
        ("random", {"python": [3, None]}),
        ("steps", 12),
        ("position", [2, 3]),
        ("places", [[2, 3], [4, 0]]),
        ("shares", [[0, 4, 4]]),
        ("groups", [{"lr": 0.1, "betas": [0.9, 0.99]}]),
        ("kept", [{"last_epoch": 12}]),
    ]


def change(record: FileRecord, **facts) -> FileRecord:
    changed = {name: value for name, value in {**record.facts, **facts}.items() if value is not None}
    return FileRecord(record.name, record.size, record.header, record.tensors, changed)


def test_a_file_from_before_there_were_shares_is_read(tmp_path):
    record = change(write_worker(tmp_path, 12, 1, STATE), shares=None)
    assert read_worker(complete(tmp_path, record), 1).shares == []


@pytest.mark.parametrize("facts", [{"position": [1]}, {"position": "x"}, {"groups": None}, {"kept": {}}])
def test_facts_that_do_not_fit_are_refused(tmp_path, facts):
    snapshot = complete(tmp_path, change(write_worker(tmp_path, 12, 1, STATE), **facts))
    with pytest.raises(SnapshotError, match="`worker-1.safetensors` of"):
        read_worker(snapshot, 1)


def test_a_writer_tells_of_files_and_of_failures(tmp_path):
    step_folder(tmp_path, 1).write_bytes(b"in the way")
    written: list[tuple[int, FileRecord]] = []
    writer = WorkerWriter(tmp_path, 1, lambda seq, record: written.append((seq, record)))
    for seq in (1, 12):
        writer.write(seq, STATE)
    writer.wait(30)
    [(seq, record)] = written
    assert (seq, record.facts["steps"]) == (12, 12)
    [(failed, why)] = writer.failures()
    assert failed == 1
    assert "step-000000001" in why
    assert writer.failures() == []


def test_any_fault_of_a_write_is_told(tmp_path):
    def refuse(seq: int, record: FileRecord) -> None:
        raise ValueError("no record can be made")

    writer = WorkerWriter(tmp_path, 1, refuse)
    writer.write(12, STATE)
    writer.wait(30)
    assert writer.failures() == [(12, "no record can be made")]
