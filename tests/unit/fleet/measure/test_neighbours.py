"""Jobs beside a timed one, as real processes: they train while it is timed, and are gone afterwards."""

import os
import time

import psutil
import pytest

from shoestring.errors import FleetError
from shoestring.fleet.engine.devices import Device
from shoestring.fleet.engine.local import LocalEngine
from shoestring.fleet.jobs import Job
from shoestring.fleet.measure.profile import Profiler
from tests.unit.fleet.scripted import GIB, cpu

CORES = sorted(os.sched_getaffinity(0))
ONE, TWO = cpu("one", CORES[0]), cpu("two", CORES[-1])
LIMIT_S = 240.0

# Steps without work: what the timed one and its neighbour do instead is the test's.
TRAIN = """
import itertools, os, signal, sys, time
from pathlib import Path

import psutil
from shoestring.worker.trial import Trial

how = sys.argv[1]
folder = Path(os.environ["SHOESTRING_FOLDER"])
is_timed = not folder.name.startswith("beside-")
(folder / "pid").write_text(str(os.getpid()))
steps = (folder / "steps").open("wb", buffering=0)
beside = folder / "beside-two"


def has_begun(folder):
    return (folder / "steps").exists() and (folder / "steps").stat().st_size > 0


def wait_for_a_step():
    before = (beside / "steps").stat().st_size
    while (beside / "steps").stat().st_size == before:
        time.sleep(0.01)


def wait_for_its_end():
    try:
        process = psutil.Process(int((beside / "pid").read_text()))
        while process.status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
    except psutil.NoSuchProcess:
        pass


trial = Trial()
for step in itertools.count():
    if not is_timed and how == f"dies at {step}":
        sys.exit(3)
    if not is_timed and how == "hangs":
        signal.pause()
    while not is_timed and how == "trains" and not has_begun(folder.parent):  # the later of the two
        time.sleep(0.01)
    trial.step_begins(step)
    steps.write(b".")
    if is_timed and how == "fails" and step == 2:
        sys.exit("what a pity")
    if is_timed and how == "trains" and step > 0:
        assert has_begun(beside)
        wait_for_a_step()
    if is_timed and how == "dies at 3" and step == 4:
        wait_for_its_end()
    while is_timed and how == "hangs" and not (beside / "steps").exists():
        time.sleep(0.01)
"""


class RefusingEngine(LocalEngine):
    """Starts nothing on `two`."""

    def start(self, task):
        if task.devices == (TWO,):
            raise FleetError("no room", hint="make some")
        return super().start(task)


class InterruptedEngine(LocalEngine):
    """Ctrl-C, as soon as the neighbour is there."""

    def start(self, task):
        running = super().start(task)
        if task.devices == (ONE,):
            running.wait = lambda timeout_s: self._interrupt(task.folder / "beside-two" / "steps")
        return running

    def _interrupt(self, sign):
        deadline = time.monotonic() + LIMIT_S
        while not sign.exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        raise KeyboardInterrupt


class Fleet:
    """A profiler of one job on two CPU devices of this machine."""

    def __init__(self, folder, engine=LocalEngine):
        self.engine = engine([ONE, TWO])
        self.script = folder / "train.py"
        self.script.write_text(TRAIN)
        self.folder = folder / "profile"
        self.said = []

    def profile(self, how, device=ONE, **given):
        profiler = Profiler(self.engine, self.folder, self.said.append, steps=5, seconds=0)
        job = Job("a", str(self.script), (how,), batches=(1,), steps=100)
        return profiler.profile(job, device, **given).samples[0]

    @property
    def beside(self):
        return self.folder / "a-one-1" / "beside-two"

    def neighbour_is_gone(self):
        return not psutil.pid_exists(int((self.beside / "pid").read_text()))


@pytest.fixture
def start(tmp_path, monkeypatch):
    monkeypatch.setattr("shoestring.fleet.measure.neighbours._LATE_S", LIMIT_S)
    started = []

    def make(engine=LocalEngine):
        started.append(Fleet(tmp_path, engine))
        return started[-1]

    yield make
    for fleet in started:
        fleet.engine.close()


def test_the_neighbour_trains_in_every_timed_step_and_is_gone_afterwards(start):
    """The script waits in each step for one of its neighbour's: alone it would never end."""
    fleet = start()
    for _ in range(2):  # what the first has left does not let the second begin early
        assert fleet.profile("trains").missing == ()
        assert fleet.neighbour_is_gone()
        assert not (fleet.beside / "trial.json").exists()
        for folder in (fleet.beside, fleet.beside.parent):
            (folder / "steps").unlink()
    assert len(fleet.said) == 2


def test_no_neighbour_is_left_when_the_profile_fails(start):
    fleet = start()
    with pytest.raises(FleetError, match="exit code 1 before 5 steps(?s:.*)what a pity"):
        fleet.profile("fails")
    assert fleet.neighbour_is_gone()


def test_no_neighbour_is_left_after_ctrl_c(start):
    fleet = start(InterruptedEngine)
    with pytest.raises(KeyboardInterrupt):
        fleet.profile("trains")
    assert fleet.neighbour_is_gone()


@pytest.mark.parametrize("how", ["dies at 0", "dies at 3"])
def test_a_neighbour_that_dies_is_survived_and_named(start, how):
    fleet = start()
    assert fleet.profile(how).missing == ("two",)
    assert fleet.said[0] == "`a` on one, batch 1: timed without `two`: the job ended there with exit code 3"


def test_a_neighbour_that_cannot_be_started_is_survived_and_named(start):
    fleet = start(RefusingEngine)
    assert fleet.profile("alone").missing == ("two",)
    assert "timed without `two`: the job could not be started there: no room" in fleet.said[0]


def test_a_neighbour_that_takes_no_step_is_waited_for_no_longer_than_the_limit(start, monkeypatch):
    fleet = start()
    monkeypatch.setattr("shoestring.fleet.measure.neighbours._LATE_S", 0.0)
    assert fleet.profile("hangs").missing == ("two",)
    assert "the job took no step there within 0 s" in fleet.said[0]
    assert fleet.neighbour_is_gone()


@pytest.mark.parametrize(
    ("device", "busy"),
    [(Device("gpu", "gpu", 8 * GIB, 8 * GIB, uuid="GPU-of-nobody"), ()), (ONE, ("two",))],
    ids=["gpu", "busy"],
)
def test_a_gpu_has_no_neighbours_and_busy_devices_are_left_alone(start, device, busy):
    fleet = start()
    assert fleet.profile("alone", device, busy=busy).missing == ()
    assert list(fleet.folder.glob("*/beside-*")) == []
