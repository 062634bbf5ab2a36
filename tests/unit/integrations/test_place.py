"""A library that counts other processes than the run has workers is refused."""

import pytest

from shoestring.config import Run
from shoestring.errors import UsageError
from shoestring.integrations import place

TOLD = {"RANK": "1", "WORLD_SIZE": "3", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


@pytest.fixture
def told(monkeypatch):
    """Lets a test say what the run is, and what the environment says."""

    def tell(run, **variables):
        monkeypatch.setattr(place, "init", lambda: run)
        monkeypatch.setattr(place.dist, "is_initialized", lambda: False)
        for name in place.VARIABLES:
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return tell


def test_a_run_of_one_needs_no_variables(told):
    told(Run())
    assert place.told_place() == Run()


def test_a_place_that_is_told_is_the_runs(told):
    run = Run(worker=1, workers=3, local=1)
    told(run, **TOLD)
    assert place.told_place() == run


def test_missing_variables_are_named(told):
    told(Run(worker=1, workers=3), RANK="1", WORLD_SIZE="3", LOCAL_RANK="1")
    with pytest.raises(UsageError, match="lacks `MASTER_ADDR`, `MASTER_PORT`.*`torchrun`"):
        place.told_place()


@pytest.mark.parametrize("wrong", [{"RANK": "2"}, {"WORLD_SIZE": "4"}])
def test_another_place_is_refused(told, wrong):
    told(Run(worker=1, workers=3), **{**TOLD, **wrong})
    with pytest.raises(UsageError, match="this is worker 1 of 3, but to the environment process"):
        place.told_place()


def test_a_process_group_that_is_there_is_what_counts(told, monkeypatch):
    told(Run(worker=1, workers=3))
    monkeypatch.setattr(place.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(place.dist, "get_rank", lambda: 1)
    for processes in (3, 2):
        monkeypatch.setattr(place.dist, "get_world_size", lambda processes=processes: processes)
        if processes == 3:
            assert place.told_place().worker == 1
        else:
            with pytest.raises(UsageError, match="but to the process group process 1 of 2"):
                place.told_place()
