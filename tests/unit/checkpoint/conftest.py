"""A root with checkpoints in it."""

import pytest

from tests.unit.checkpoint.checkpoints import write_checkpoint


@pytest.fixture
def root(tmp_path):
    """Two complete checkpoints, of steps 100 and 200."""
    root = tmp_path / "checkpoints"
    write_checkpoint(root, 100)
    write_checkpoint(root, 200)
    return root
