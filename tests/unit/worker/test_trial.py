"""What a fleet asks of a script: some timed steps, an end behind a checkpoint, nothing unasked."""

import itertools
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from shoestring.config import Run
from shoestring.errors import UsageError
from shoestring.fleet.contract import STOPPED, TrialRequest, TrialResult
from shoestring.worker import session
from shoestring.worker.trial import Trial


def test_without_a_fleet_nothing_happens():
    trial = Trial({})
    for rounds in range(100):
        trial.step_begins(rounds)


def test_steps_are_timed_and_the_script_ends(tmp_path):
    result = tmp_path / "result.json"
    trial = Trial(TrialRequest(result, steps=4).to_environment())
    for rounds in range(9):  # five that are not timed, four that are
        trial.step_begins(rounds)
        assert not result.exists()
    with pytest.raises(SystemExit) as leaving:
        trial.step_begins(9)
    assert leaving.value.code == 0
    found = TrialResult.read(result)
    assert len(found.step_s) == 4
    assert found.peak_bytes > 1 << 20
    assert found.first_at <= found.ended_at
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


SHORT = """
import sys
from shoestring.worker.trial import Trial

trial = Trial()
for rounds in range(int(sys.argv[1])):
    trial.step_begins(rounds)
"""


@pytest.mark.parametrize(("begun", "timed"), [(12, 6), (8, None)])
def test_a_script_that_is_too_short_tells_what_it_has(tmp_path, begun, timed):
    """Five steps are passed over, and fewer than three say nothing."""
    result = tmp_path / "result.json"
    environment = os.environ | TrialRequest(result, steps=50).to_environment()
    subprocess.run([sys.executable, "-c", SHORT, str(begun)], env=environment, check=True, timeout=60)
    assert (len(TrialResult.read(result).step_s) if result.exists() else None) == timed


def test_it_ends_behind_a_checkpoint_once_it_is_asked(tmp_path):
    stop = tmp_path / "stop"
    trial = Trial({"SHOESTRING_STOP": str(stop), "SHOESTRING_EVERY": "3"})
    for rounds in range(4):
        trial.step_begins(rounds)
    stop.touch()
    trial.step_begins(4)
    trial.step_begins(5)
    with pytest.raises(SystemExit) as leaving:
        trial.step_begins(6)
    assert leaving.value.code == STOPPED


def test_the_run_is_left_in_order_before_the_script_ends(tmp_path):
    (tmp_path / "stop").touch()
    trial = Trial({"SHOESTRING_STOP": str(tmp_path / "stop"), "SHOESTRING_EVERY": "1"})
    closed = []
    session.begin(Run()).closers.append(lambda: closed.append("closed"))
    try:
        trial.step_begins(1)
        with pytest.raises(SystemExit):
            trial.step_begins(2)
        assert closed == ["closed"]
    finally:
        session.end()


def test_a_run_that_has_just_begun_from_a_checkpoint_takes_a_step_first(tmp_path):
    stop = tmp_path / "stop"
    stop.touch()
    trial = Trial({"SHOESTRING_STOP": str(stop), "SHOESTRING_EVERY": "3"})
    trial.step_begins(3)  # where it was resumed: nothing new is saved yet


def test_local_steps_after_a_checkpoint_are_not_thrown_away(tmp_path):
    """A round of several local steps: only the first of them begins right behind the checkpoint."""
    stop = tmp_path / "stop"
    trial = Trial({"SHOESTRING_STOP": str(stop), "SHOESTRING_EVERY": "2"})
    for rounds in (0, 0, 1, 1, 2):
        trial.step_begins(rounds)
    stop.touch()
    for rounds in (2, 2, 3, 3):
        trial.step_begins(rounds)
    with pytest.raises(SystemExit):
        trial.step_begins(4)


def test_without_checkpoints_it_never_ends_early(tmp_path):
    stop = tmp_path / "stop"
    stop.touch()
    trial = Trial({"SHOESTRING_STOP": str(stop)})
    for rounds in range(20):
        trial.step_begins(rounds)


def test_a_setting_that_is_no_number_is_refused():
    with pytest.raises(UsageError, match="`SHOESTRING_EVERY` is `often`"):
        Trial({"SHOESTRING_EVERY": "often"})


def test_a_trial_that_is_asked_for_longer_does_not_end_after_the_usual_time(tmp_path, monkeypatch):
    clock = itertools.count(0, 100)  # seconds
    monkeypatch.setattr("time.perf_counter", lambda: float(next(clock)))
    usual = TrialRequest(tmp_path / "result.json", steps=1000)
    patient = replace(usual, seconds=10**9)
    take_steps(patient)
    with pytest.raises(SystemExit):
        take_steps(usual)


def take_steps(request):
    trial = Trial(request.to_environment())
    for rounds in range(100):
        trial.step_begins(rounds)
