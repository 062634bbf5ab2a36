"""The runner against an engine without processes: who is started, moved, stopped, and what is kept."""

import pytest

from shoestring.errors import FleetError
from shoestring.fleet.allocate.plan import Placement, Plan
from shoestring.fleet.engine.devices import Device
from shoestring.fleet.jobs import Job
from shoestring.fleet.measure.profile import Profile, Profiler, Sample
from shoestring.fleet.run.database import Database
from shoestring.fleet.run.runner import Runner
from tests.unit.fleet.scripted import GIB, MeasuredEngine, ScriptedEngine, cpu

FAST, SLOW = cpu("fast"), cpu("slow", 1)


def place(kind, *jobs, devices=1):
    return Placement(kind, jobs, devices, (1.0,) * len(jobs))


class Plans:
    """A planner that answers what the test wrote down last, for the jobs that are still there."""

    def __init__(self, *placements):
        self.placements = placements
        self.asked = []

    def __call__(self, estimates, last):
        there = {demand.job for demand in estimates.demands}
        self.asked.append({demand.job: demand for demand in estimates.demands})
        if any(placement is None for placement in self.placements):
            raise FleetError("no plan today", hint="try tomorrow")
        placed = tuple(p for p in self.placements if set(p.jobs) <= there)
        waiting = there - {job for p in placed for job in p.jobs}
        return Plan(placed, dict.fromkeys(waiting, "waits"), {job: f"{job} is there" for job in there})


@pytest.fixture
def database(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("pass\n")
    with Database(tmp_path / "fleet") as found:
        found.add([Job(name, str(script), batches=(8,), steps=100, every=10) for name in "abc"])
        for kind, step_s in (("fast", 0.1), ("slow", 0.4)):
            profile = Profile("", kind, (Sample(8, step_s, 0.0, GIB, 1.0, 1.0, steps=9),))
            found.save_profile(found.entry("a").key, kind, profile.to_json())
        yield found


@pytest.fixture
def engine():
    with_engine = ScriptedEngine((FAST, SLOW))
    yield with_engine
    with_engine.close()


def states(database):
    return {e.job.name: (e.state, e.device) for e in database.entries()}


def test_jobs_start_where_the_plan_says_and_the_rest_waits(database, engine):
    runner = Runner(database, engine, Plans(place("fast", "a"), place("slow", "b")))
    assert runner.look()
    assert states(database) == {"a": ("running", "fast"), "b": ("running", "slow"), "c": ("queued", "")}
    assert database.entry("c").note == "c is there"
    task = engine.latest("a").task
    assert (task.devices, task.every, task.environment["SHOESTRING_BATCH"]) == ((FAST,), 10, "8")
    assert task.checkpoint == database.job_folder("a") / "checkpoints"


def test_a_job_that_ends_makes_room_for_the_next(database, engine):
    plans = Plans(place("fast", "a"))
    runner = Runner(database, engine, plans)
    runner.look()
    engine.latest("a").step_to(100)
    engine.latest("a").finish()
    plans.placements = (place("fast", "c"),)
    runner.look()
    assert states(database) == {"a": ("done", "fast"), "b": ("queued", ""), "c": ("running", "fast")}
    assert database.entry("a").steps == 100
    assert set(plans.asked[-1]) == {"b", "c"}


def test_nothing_is_decided_while_nothing_changes(database, engine):
    plans = Plans(place("fast", "a"))
    runner = Runner(database, engine, plans, round_s=1e9)
    for _ in range(3):
        runner.look()
    assert len(plans.asked) == 1


def test_a_moved_job_stops_at_a_checkpoint_and_goes_on_elsewhere(database, engine):
    plans = Plans(place("fast", "a"), place("slow", "b"))
    runner = Runner(database, engine, plans, round_s=0.0)
    runner.look()
    engine.latest("b").step_to(33)
    plans.placements = (place("fast", "b"), place("slow", "a"))
    runner.look()
    assert engine.latest("a").is_asked
    assert engine.latest("b").is_asked
    assert len(engine.tasks) == 2  # both devices are still in use
    engine.latest("b").obey()
    runner.look()
    assert states(database)["b"] == ("stopped", "")
    assert len(engine.tasks) == 2  # b's next device is still a's
    engine.latest("a").obey()
    runner.look()
    assert states(database) == {"a": ("running", "slow"), "b": ("running", "fast"), "c": ("queued", "")}
    assert plans.asked[-1]["b"].remaining_steps == 67
    assert [c.state for c in database.history("b")] == ["queued", "running", "stopped", "running"]


def test_a_job_that_is_to_stay_after_all_is_not_stopped(database, engine):
    plans = Plans(place("fast", "a"))
    runner = Runner(database, engine, plans, round_s=0.0)
    runner.look()
    plans.placements = (place("slow", "a"),)
    runner.look()
    assert engine.latest("a").is_asked
    plans.placements = (place("fast", "a"),)
    runner.look()
    assert not engine.latest("a").is_asked
    assert len(engine.tasks) == 1


def test_a_job_that_stays_is_left_alone(database, engine):
    plans = Plans(place("fast", "a"))
    runner = Runner(database, engine, plans, round_s=0.0)
    for _ in range(3):
        runner.look()
    assert len(engine.tasks) == 1
    assert not engine.latest("a").is_asked


def test_a_pair_shares_a_device_and_each_is_capped(database):
    engine = ScriptedEngine((Device("fast", "fast", 80 * GIB, 40 * GIB, uuid="GPU-1"),))
    runner = Runner(database, engine, Plans(place("fast", "a", "b")))
    runner.look()
    assert states(database) == {"a": ("running", "fast"), "b": ("running", "fast"), "c": ("queued", "")}
    assert engine.latest("a").task.memory_bytes == pytest.approx(1.05 * GIB, rel=1e-6)
    work = database.entry("a").key + ":8"
    assert [life.partner for life in runner.lives.values()] == [work, work]
    engine.latest("b").finish()
    runner.look()
    assert runner.lives["a"].partner == ""
    engine.close()


def test_a_job_alone_may_take_what_others_left_free(database):
    engine = ScriptedEngine((Device("fast", "fast", 80 * GIB, 40 * GIB, uuid="GPU-1"),))
    Runner(database, engine, Plans(place("fast", "a"))).look()
    assert engine.latest("a").task.memory_bytes == 40 * GIB
    engine.close()


def test_a_job_that_fails_is_not_started_again(database, engine):
    runner = Runner(database, engine, Plans(place("fast", "a")), round_s=0.0)
    runner.look()
    engine.latest("a").step_to(7)
    engine.latest("a").finish(3)
    runner.look()
    assert states(database)["a"] == ("failed", "fast")
    assert database.entry("a").note == "exit code 3 after 7 steps"
    assert len(engine.tasks) == 1


def test_an_unwanted_job_is_ended_and_forgotten(database, engine):
    runner = Runner(database, engine, Plans(place("fast", "a")))
    runner.look()
    database.unwant("a")
    runner.look()
    assert engine.latest("a").code == 137
    assert list(states(database)) == ["b", "c"]
    assert not database.job_folder("a").exists()


def test_a_planner_that_fails_leaves_the_last_plan_standing(database, engine):
    plans, said = Plans(place("fast", "a")), []
    runner = Runner(database, engine, plans, round_s=0.0, say=said.append)
    runner.look()
    plans.placements = (None,)
    runner.look()
    assert states(database)["a"] == ("running", "fast")
    assert not engine.latest("a").is_asked
    assert said == ["no new plan: no plan today"]


def test_stopping_leaves_every_job_stopped(database, engine):
    runner = Runner(database, engine, Plans(place("fast", "a"), place("slow", "b")))
    runner.look()
    engine.latest("a").ask_stop()
    engine.latest("a").obey()
    runner.stop(grace_s=0.0)
    assert states(database) == {"a": ("stopped", ""), "b": ("stopped", ""), "c": ("queued", "")}
    assert [change.note for change in database.history("b")][-1] == "ended before its next checkpoint"
    assert runner.lives == {}


def test_a_job_that_was_not_profiled_is_profiled_on_idle_devices(database, engine, tmp_path):
    script = tmp_path / "elsewhere" / "new.py"
    script.parent.mkdir()
    script.write_text("print(1)\n")
    database.add([Job("new", str(script), batches=(4,), steps=5)])
    measured = MeasuredEngine((FAST, SLOW), lambda b: 0.01 * b, lambda b: GIB)
    profiler = Profiler(measured, tmp_path / "profile")
    plans = Plans(place("slow", "a"))
    runner = Runner(database, engine, plans, profiler)
    runner.look()
    assert set(database.profiles(database.entry("new").key)) == {"fast", "slow"}
    assert plans.asked[-1]["new"].speeds == pytest.approx({"fast": 25.0, "slow": 25.0})


def test_a_profile_leaves_the_devices_of_running_jobs_alone(database, engine, tmp_path):
    asked = []

    class Asked(Profiler):
        def profile(self, job, device, busy=()):
            asked.append((job.name, device.name, set(busy)))
            return super().profile(job, device, busy)

    measured = MeasuredEngine((FAST, SLOW), lambda b: 0.01 * b, lambda b: GIB)
    runner = Runner(database, engine, Plans(place("slow", "a")), Asked(measured, tmp_path / "profile"))
    runner.look()
    script = tmp_path / "elsewhere" / "new.py"
    script.parent.mkdir()
    script.write_text("print(1)\n")
    database.add([Job("new", str(script), batches=(4,), steps=5)])
    runner.look()
    assert asked == [("new", "fast", {"slow"})]


def test_a_job_with_a_profile_of_the_first_version_is_profiled_again(database, engine, tmp_path):
    key = database.entry("a").key
    for kind, data in database.profiles(key).items():
        database.save_profile(key, kind, data.replace('"version":2', '"version":1'))
    measured = MeasuredEngine((FAST, SLOW), lambda b: 0.01 * b, lambda b: GIB)
    runner = Runner(database, engine, Plans(place("slow", "a")), Profiler(measured, tmp_path / "profile"))
    runner.look()
    assert measured.batches == [2, 4, 8] * 2  # once on each kind, for all jobs of the same code
    assert all('"version":2' in data for data in database.profiles(key).values())


def test_a_script_that_cannot_be_profiled_fails_alone(database, engine, tmp_path):
    script = tmp_path / "elsewhere" / "new.py"
    script.parent.mkdir()
    script.write_text("print(1)\n")
    database.add([Job("new", str(script), batches=(4,), steps=5)])
    broken = MeasuredEngine((FAST, SLOW), None, None, fails_at=(1, 2, 4), words="SyntaxError: what")
    runner = Runner(database, engine, Plans(place("fast", "a")), Profiler(broken, tmp_path / "profile"))
    runner.look()
    assert states(database)["new"][0] == "failed"
    assert "SyntaxError: what" in database.entry("new").note
    assert states(database)["a"] == ("running", "fast")


def test_speeds_seen_while_running_reach_the_next_decision(database, engine):
    plans = Plans(place("fast", "a"))
    runner = Runner(database, engine, plans, round_s=0.0)
    runner.look()
    life = runner.lives["a"]
    for step in range(1, 102, 10):  # 10 steps a second, by the clock of the events
        life._step(step, step / 10, {"worker": 0})
    runner.look()
    assert plans.asked[-1]["a"].speeds["fast"] == pytest.approx(10.0)
