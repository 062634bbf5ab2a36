"""What is removed of older checkpoints and abandoned attempts, and what never is."""

import os

import numpy as np
import pytest

from shoestring.checkpoint.snapshot import (
    discard,
    newest,
    prune,
    step_folder,
)
from shoestring.errors import SnapshotError, UsageError
from tests.unit.checkpoint.checkpoints import (
    FILES,
    assert_holds,
    flip,
    write_checkpoint,
    write_file,
    write_files,
)


def test_prune_keeps_the_newest_complete_ones(root):
    write_checkpoint(root, 300)
    assert prune(root, 3) == []
    assert prune(root, 2) == [root / "step-000000100"]
    assert prune(root, 1) == [root / "step-000000200"]
    assert prune(root, 1) == []
    assert os.listdir(root) == ["step-000000300"]
    assert_holds(newest(root)[0], 300)


@pytest.mark.parametrize("keep", [0, -1])
def test_prune_never_removes_all(root, keep):
    with pytest.raises(UsageError, match=f"cannot keep {keep} checkpoints"):
        prune(root, keep)
    assert_holds(newest(root)[0], 200)


def test_prune_removes_what_abandoned_attempts_left(root):
    left = root / "step-000000200" / "shard-0.safetensors.0123abcd.partial"
    left.write_bytes(b"half")
    older, newer = step_folder(root, 150), step_folder(root, 300)
    for folder in (older, newer):
        write_files(folder, 1)
        (folder / "worker-0.safetensors.0123abcd.partial").write_bytes(b"half")
    assert prune(root, 5) == [left, older]
    # The newer one may still be being written.
    assert sorted(os.listdir(root)) == ["step-000000100", "step-000000200", "step-000000300"]
    assert len(os.listdir(newer)) == 4
    assert_holds(newest(root)[0], 200)


def test_prune_without_a_complete_checkpoint_removes_nothing(tmp_path):
    write_files(step_folder(tmp_path, 1), 1)
    write_files(step_folder(tmp_path, 2), 2)
    assert prune(tmp_path, 1) == []
    assert len(os.listdir(tmp_path)) == 2


def test_prune_does_not_count_or_remove_broken_ones(root):
    """One that cannot be opened must not push out one that can."""
    for step in (300, 150):
        folder = write_checkpoint(root, step)
        (folder / "manifest.json").write_text('{"format":2,"shoestring":"9.8.7"}')
    os.truncate(write_checkpoint(root, 400) / FILES[0], 10)
    assert prune(root, 1) == [root / "step-000000100"]
    assert_holds(newest(root)[0], 200)
    assert len(os.listdir(root)) == 4


def test_prune_leaves_what_it_did_not_write(root, tmp_path):
    mine = root / "step-000000100" / "notes.txt"
    mine.write_text("the good one")
    outside = tmp_path / "outside.safetensors"
    outside.write_text("not ours")
    (root / "step-000000100" / "link.safetensors").symlink_to(outside)
    (root / "step-000000050").symlink_to(tmp_path, target_is_directory=True)
    assert prune(root, 1) == [root / "step-000000100"]
    assert os.listdir(root / "step-000000100") == ["notes.txt"]
    assert outside.read_text() == "not ours"
    assert (root / "step-000000050").is_symlink()


def test_what_is_half_removed_does_not_look_complete(root, monkeypatch):
    real, calls = os.unlink, []

    def refuse_the_second(path, **options):
        calls.append(path)
        if len(calls) > 1:
            raise PermissionError(1, "Operation not permitted", str(path))
        real(path, **options)

    monkeypatch.setattr(os, "unlink", refuse_the_second)
    with pytest.raises(
        SnapshotError, match="step-000000100/shard-0.safetensors` cannot be removed"
    ) as caught:
        prune(root, 1)
    assert "right to use that folder" in caught.value.hint
    assert calls[0] == root / "step-000000100" / "manifest.json"
    assert sorted(os.listdir(root / "step-000000100")) == FILES
    assert_holds(newest(root)[0], 200)


def test_discard_removes_an_attempt_and_never_a_checkpoint(root, tmp_path):
    attempt = step_folder(root, 300)
    write_files(attempt, 300)
    for folder in (attempt, attempt, root / "step-000000200"):
        discard(folder)
    assert sorted(os.listdir(root)) == ["step-000000100", "step-000000200"]
    assert_holds(newest(root)[0], 200)
    model = tmp_path / "model"
    write_file(model / "weights.safetensors", {"x": np.zeros(3)})
    discard(model)  # no step's folder
    assert os.listdir(model) == ["weights.safetensors"]


def test_a_step_can_be_written_again(root):
    """A run restored from an older checkpoint comes to the same step once more."""
    flip(root / "step-000000200" / FILES[0], 5000, 0)
    assert_holds(newest(root)[0], 100)
    write_checkpoint(root, 200)
    assert newest(root)[1] == []
    assert_holds(newest(root)[0], 200)
