"""Which files make a checkpoint complete, and which rounds are waited for."""

import pytest

from shoestring.checkpoint.completion import Completion
from shoestring.checkpoint.snapshot import FileRecord, Snapshot, TensorFileWriter, step_folder
from shoestring.errors import SnapshotError


def write(root, seq: int, name: str) -> FileRecord:
    folder = step_folder(root, seq)
    folder.mkdir(parents=True, exist_ok=True)
    with TensorFileWriter(folder / f"{name}.safetensors", {}) as writer:
        return writer.finish()


def make(root, shards: int = 2, retain: int = 3) -> Completion:
    return Completion(root, workers=1, shards=shards, retain=retain)


def test_every_shard_that_holds_a_part_must_have_reported(tmp_path):
    completion = make(tmp_path)
    completion.expect(4, 40)
    completion.report(4, [write(tmp_path, 4, "shard-0"), write(tmp_path, 4, "worker-0")])
    assert completion.first_whole() is None
    completion.report(4, [write(tmp_path, 4, "shard-2")])
    assert completion.first_whole() == 4
    assert completion.complete(4, {"table": []}) == (step_folder(tmp_path, 4), [])
    assert Snapshot(step_folder(tmp_path, 4)).manifest.facts == {"table": [], "steps": 40}
    assert not completion.is_waiting


def test_a_round_that_nobody_expects_is_not_completed(tmp_path):
    completion = make(tmp_path, shards=1)
    completion.report(4, [write(tmp_path, 4, "shard-0")])
    assert completion.first_whole() is None
    completion.expect(4, 4)
    assert completion.first_whole() == 4


def test_only_so_many_checkpoints_are_retained(tmp_path):
    completion = make(tmp_path, shards=1, retain=2)
    for seq in (4, 8, 12):
        completion.expect(seq, seq)
        completion.report(seq, [write(tmp_path, seq, "shard-0")])
        completion.complete(seq, {})
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-000000008", "step-000000012"]


def test_a_later_checkpoint_settles_the_earlier_ones(tmp_path):
    completion = make(tmp_path, shards=1)
    for seq in (4, 8, 12):
        completion.expect(seq, seq)
    completion.report(8, [write(tmp_path, 8, "shard-0")])
    assert completion.complete(8, {}) == (step_folder(tmp_path, 8), [4])
    completion.report(4, [write(tmp_path, 4, "shard-0")])
    assert completion.first_whole() is None
    assert not completion.give_up(4)
    assert completion.is_waiting  # for the last


def test_only_the_newest_rounds_are_waited_for(tmp_path):
    completion = make(tmp_path)
    assert [completion.expect(seq, seq) for seq in range(1, 7)] == [[], [], [], [], [1], [2]]


def test_a_round_is_given_up_once(tmp_path):
    completion = make(tmp_path, shards=1)
    completion.expect(4, 4)
    assert completion.give_up(4)
    assert not completion.give_up(4)
    completion.report(4, [write(tmp_path, 4, "shard-0")])
    completion.expect(4, 4)
    assert completion.first_whole() is None
    assert not completion.is_waiting


def test_a_checkpoint_whose_files_are_gone_is_not_completed(tmp_path):
    completion = make(tmp_path, shards=1)
    completion.expect(4, 4)
    completion.report(4, [write(tmp_path, 4, "shard-0")])
    (step_folder(tmp_path, 4) / "shard-0.safetensors").unlink()
    with pytest.raises(SnapshotError, match="is missing"):
        completion.complete(4, {})
    assert completion.give_up(4)
    assert not completion.is_waiting
