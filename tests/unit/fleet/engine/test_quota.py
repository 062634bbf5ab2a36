"""A share of cores: set where the machine allows it, refused with a hint where it does not."""

import os
from pathlib import Path

import pytest

from shoestring.errors import FleetError
from shoestring.fleet.engine.quota import PERIOD_US, Quota


def test_a_machine_without_control_groups_is_told_what_to_do(tmp_path):
    with pytest.raises(FleetError, match="a share of 0.5 cores cannot be set") as caught:
        Quota("slow", 0.5, root=tmp_path)
    assert "whole cores" in caught.value.hint


@pytest.mark.parametrize("version", [1, 2])
def test_a_group_that_knows_no_limit_is_removed_again(tmp_path, version):
    """As in a tree whose CPU controller is not there: folders can be made, files are missing."""
    if version == 1:
        (tmp_path / "cpu").mkdir()
        (tmp_path / "cpu" / "cpu.cfs_quota_us").touch()
    before = sorted(path.name for path in tmp_path.rglob("*"))
    with pytest.raises(FleetError):
        Quota("slow", 0.5, root=tmp_path)
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


def test_groups_of_dead_processes_are_removed(tmp_path):
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").touch()
    names = [f"shoestring-{os.getpid()}-mine", f"shoestring-{2**22 + 1}-slow", "shoestring-x-y", "other"]
    for name in names:
        (tmp_path / "cpu" / name).mkdir()
    with pytest.raises(FleetError):
        Quota("slow", 0.5, root=tmp_path)
    left = {path.name for path in (tmp_path / "cpu").iterdir() if path.is_dir()}
    assert left == {names[0], *names[2:]}  # no process has a number beyond 2**22


def test_this_machine_sets_it_or_says_that_it_cannot():
    refusal = None
    try:
        quota = Quota("test", 0.5)
    except FleetError as error:
        refusal = error
    if refusal is not None:
        assert "control group" in refusal.hint
        return
    try:
        first, second = quota.folder / "cpu.cfs_quota_us", quota.folder / "cpu.max"
        text = first.read_text() if first.exists() else second.read_text()
        assert int(text.split()[0]) == PERIOD_US // 2
    finally:
        quota.close()
    assert not Path(quota.folder).exists()
