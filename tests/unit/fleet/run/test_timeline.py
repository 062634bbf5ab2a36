"""From history to intervals, and to a page that needs nothing else."""

import pytest

from shoestring.errors import FleetError
from shoestring.fleet.run.database import Change
from shoestring.fleet.run.timeline import Interval, draw, intervals


def change(job, at, state, device=""):
    return Change(job, at, state, device, 8, 0, "")


HISTORY = [
    change("a", 0, "queued"),
    change("b", 0, "queued"),
    change("a", 1, "running", "fast"),
    change("b", 2, "running", "slow"),
    change("a", 5, "stopped"),
    change("a", 6, "running", "slow+fast"),
    change("b", 7, "failed", "slow"),
]


def test_a_job_is_on_its_devices_until_it_leaves_them():
    assert intervals(HISTORY, now=10) == [
        Interval("a", "fast", 1, 5, "stopped"),
        Interval("b", "slow", 2, 7, "failed"),
        Interval("a", "fast", 6, 10, "running"),
        Interval("a", "slow", 6, 10, "running"),
    ]


def test_the_page_carries_all_it_needs(tmp_path):
    path = draw(intervals(HISTORY, now=10), tmp_path / "fleet.html")
    text = path.read_text()
    assert "Which job was on which device" in text
    assert "<script src=" not in text


def test_a_fleet_that_never_ran_has_no_chart(tmp_path):
    with pytest.raises(FleetError, match="no job of this fleet has run yet"):
        draw([], tmp_path / "fleet.html")
