"""What a fleet asks of a script: some timed steps, an end behind a checkpoint, nothing unasked."""

import json
import os
import subprocess
import sys

import pytest

from shoestring.config import Run
from shoestring.errors import UsageError
from shoestring.worker import session
from shoestring.worker.probe import STOPPED, Probe


def test_without_a_fleet_nothing_happens():
    probe = Probe({})
    for rounds in range(100):
        probe.step_begins(rounds)


def test_steps_are_timed_and_the_script_ends(tmp_path):
    result = tmp_path / "result.json"
    probe = Probe({"SHOESTRING_PROBE": str(result), "SHOESTRING_PROBE_STEPS": "4"})
    for rounds in range(9):  # five that are not timed, four that are
        probe.step_begins(rounds)
        assert not result.exists()
    with pytest.raises(SystemExit) as leaving:
        probe.step_begins(9)
    assert leaving.value.code == 0
    facts = json.loads(result.read_text())
    assert len(facts["step_s"]) == 4
    assert all(seconds >= 0 for seconds in facts["step_s"])
    assert facts["peak_bytes"] > 1 << 20
    assert facts["first_at"] <= facts["ended_at"]
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


SHORT = """
import sys
from shoestring.worker.probe import Probe

probe = Probe()
for rounds in range(int(sys.argv[1])):
    probe.step_begins(rounds)
"""


@pytest.mark.parametrize(("begun", "timed"), [(12, 6), (8, None)])
def test_a_script_that_is_too_short_tells_what_it_has(tmp_path, begun, timed):
    """Five steps are passed over, and fewer than three say nothing."""
    result = tmp_path / "result.json"
    environment = os.environ | {"SHOESTRING_PROBE": str(result), "SHOESTRING_PROBE_STEPS": "50"}
    subprocess.run([sys.executable, "-c", SHORT, str(begun)], env=environment, check=True, timeout=60)
    assert (len(json.loads(result.read_text())["step_s"]) if result.exists() else None) == timed


def test_it_ends_behind_a_checkpoint_once_it_is_asked(tmp_path):
    stop = tmp_path / "stop"
    probe = Probe({"SHOESTRING_STOP": str(stop), "SHOESTRING_EVERY": "3"})
    for rounds in range(4):
        probe.step_begins(rounds)
    stop.touch()
    probe.step_begins(4)
    probe.step_begins(5)
    with pytest.raises(SystemExit) as leaving:
        probe.step_begins(6)
    assert leaving.value.code == STOPPED


def test_the_run_is_left_in_order_before_the_script_ends(tmp_path):
    (tmp_path / "stop").touch()
    probe = Probe({"SHOESTRING_STOP": str(tmp_path / "stop"), "SHOESTRING_EVERY": "1"})
    closed = []
    session.begin(Run()).closers.append(lambda: closed.append("closed"))
    try:
        probe.step_begins(1)
        with pytest.raises(SystemExit):
            probe.step_begins(2)
        assert closed == ["closed"]
    finally:
        session.end()


def test_a_run_that_has_just_begun_from_a_checkpoint_takes_a_step_first(tmp_path):
    stop = tmp_path / "stop"
    stop.touch()
    probe = Probe({"SHOESTRING_STOP": str(stop), "SHOESTRING_EVERY": "3"})
    probe.step_begins(3)  # where it was resumed: nothing new is saved yet


def test_local_steps_after_a_checkpoint_are_not_thrown_away(tmp_path):
    """A round of several local steps: only the first of them begins right behind the checkpoint."""
    stop = tmp_path / "stop"
    probe = Probe({"SHOESTRING_STOP": str(stop), "SHOESTRING_EVERY": "2"})
    for rounds in (0, 0, 1, 1, 2):
        probe.step_begins(rounds)
    stop.touch()
    for rounds in (2, 2, 3, 3):
        probe.step_begins(rounds)
    with pytest.raises(SystemExit):
        probe.step_begins(4)


def test_without_checkpoints_it_never_ends_early(tmp_path):
    stop = tmp_path / "stop"
    stop.touch()
    probe = Probe({"SHOESTRING_STOP": str(stop)})
    for rounds in range(20):
        probe.step_begins(rounds)


def test_a_setting_that_is_no_number_is_refused():
    with pytest.raises(UsageError, match="`SHOESTRING_EVERY` is `often`"):
        Probe({"SHOESTRING_EVERY": "often"})
