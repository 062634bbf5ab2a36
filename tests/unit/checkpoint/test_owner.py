"""A folder of checkpoints has one owner, the run that took it over last."""

import threading

import pytest

from shoestring.checkpoint.owner import owned, read_owner, take_over
from shoestring.errors import SnapshotError


def test_a_folder_that_nobody_took_over_has_no_owner(tmp_path):
    assert read_owner(tmp_path / "missing") == ""
    with owned(tmp_path, ""):
        pass


def test_the_last_to_take_over_owns_it(tmp_path):
    root = tmp_path / "new" / "folder"
    take_over(root)
    first = read_owner(root)
    with owned(root, first):
        pass
    take_over(root)
    assert read_owner(root) not in ("", first)
    with pytest.raises(SnapshotError, match="another run has taken over"), owned(root, first):
        pytest.fail("a stranger was let in")


def test_nobody_takes_over_in_the_middle(tmp_path):
    take_over(tmp_path)
    mine = read_owner(tmp_path)
    other = threading.Thread(target=take_over, args=(tmp_path,))
    with owned(tmp_path, mine):
        other.start()
        other.join(0.2)
        assert other.is_alive()
        assert read_owner(tmp_path) == mine
    other.join(10)
    assert read_owner(tmp_path) != mine
