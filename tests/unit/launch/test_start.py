"""`init` finds out who started the process."""

import os

import pytest

import shoestring
from shoestring.config import Run
from shoestring.launch.start import detect
from shoestring.worker import session
from tests.unit.launch.processes import clean_environment

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
SLURM = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2"}


@pytest.mark.parametrize(
    ("environment", "kind"),
    [
        ({}, "alone"),
        ({"SHOESTRING_CODEC": "int8"}, "alone"),
        (TORCHRUN, "torchrun"),
        (TORCHRUN | {"WORLD_SIZE": "1"}, "alone"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "alone"),
        (SLURM, "slurm"),
        (SLURM | {"SLURM_NTASKS": "1"}, "alone"),
        (SLURM | TORCHRUN, "torchrun"),
        (SLURM | TORCHRUN | Run().to_environment(), "shoestring"),
    ],
)
def test_detect(environment, kind):
    assert detect(environment) == kind


@pytest.fixture
def alone(monkeypatch, tmp_path):
    """An environment that tells of no run, and no session before or after."""
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name not in clean_environment():
            monkeypatch.delenv(name)
    session.end()
    yield monkeypatch
    session.end()


def test_alone_it_is_a_run_of_one(alone):
    run = shoestring.init()
    assert (run.worker, run.workers, run.is_alone) == (0, 1, True)
    assert session.current().run == run


def test_a_second_call_changes_nothing(alone):
    run = shoestring.init()
    here = session.current()
    assert shoestring.init() is run
    assert session.current() is here


def test_settings_come_from_the_environment(alone, tmp_path):
    alone.setenv("SHOESTRING_CODEC", "int8")
    alone.setenv("SHOESTRING_RESUME", "auto")
    alone.setenv("SHOESTRING_CHECKPOINT", str(tmp_path / "checkpoints"))
    run = shoestring.init()
    assert (run.codec, run.resume, run.checkpoint) == ("int8", None, tmp_path / "checkpoints")
