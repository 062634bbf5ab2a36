"""Which checkpoint a run goes on from, and what is said about it."""

import numpy as np
import pytest

from shoestring.checkpoint.resume import choose, find_snapshot
from shoestring.checkpoint.snapshot import Manifest, TensorFileWriter, commit, step_folder
from shoestring.errors import SnapshotError, UsageError


def write_checkpoint(root, step):
    folder = step_folder(root, step)
    values = np.full(3, step, np.float32)
    with TensorFileWriter(folder / "shard-0.safetensors", {"x": (values.dtype, values.shape)}) as writer:
        writer.write("x", values)
        record = writer.finish()
    commit(folder, Manifest(step=step, workers=1, shards=1, facts={}, files=[record]))
    return folder


def test_auto_takes_the_newest_and_says_which(tmp_path):
    said = []
    write_checkpoint(tmp_path, 10)
    newest = write_checkpoint(tmp_path, 20)
    assert choose("auto", tmp_path, said.append) == newest
    assert said == [f"going on from step 20, {newest}"]


def test_auto_passes_over_a_damaged_one_and_says_why(tmp_path):
    said = []
    older, newest = write_checkpoint(tmp_path, 10), write_checkpoint(tmp_path, 20)
    with (newest / "shard-0.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\xff")
    assert choose("auto", tmp_path, said.append) == older
    assert len(said) == 2
    assert said[0].startswith("passed over a checkpoint: ")
    assert str(newest) in said[0]


def test_auto_starts_fresh_where_there_is_none(tmp_path):
    said = []
    assert choose("auto", tmp_path / "new", said.append) is None
    assert said == [f"no checkpoint in {tmp_path / 'new'}: starting fresh"]
    assert choose("auto", None, said.append) is None
    assert len(said) == 1


def test_no_refuses_to_write_over_an_earlier_run(tmp_path):
    assert choose("no", tmp_path, print) is None
    write_checkpoint(tmp_path, 10)
    with pytest.raises(UsageError, match="checkpoints of an earlier run"):
        choose("no", tmp_path, print)


def test_a_given_folder_is_a_checkpoint_or_holds_some(tmp_path):
    older, newest = write_checkpoint(tmp_path, 10), write_checkpoint(tmp_path, 20)
    assert choose(str(older), None, lambda text: None) == older
    assert choose(str(tmp_path), None, lambda text: None) == newest


def test_a_given_folder_without_a_checkpoint_is_an_error(tmp_path):
    with pytest.raises(SnapshotError, match="no checkpoint in"):
        find_snapshot(tmp_path)
    with pytest.raises(SnapshotError, match="there is no folder"):
        find_snapshot(tmp_path / "missing")
    folder = write_checkpoint(tmp_path, 10)
    (folder / "shard-0.safetensors").write_bytes(b"")
    with pytest.raises(SnapshotError, match="shard-0.safetensors"):
        find_snapshot(tmp_path)
