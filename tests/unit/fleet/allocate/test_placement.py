"""Which devices a job gets: jobs stay where they can, and simulations and real runs agree."""

import random

import pytest

from shoestring.fleet.allocate.placement import place_jobs
from shoestring.fleet.allocate.plan import Placement, Plan, Pool
from shoestring.fleet.jobs import Job
from shoestring.fleet.measure.profile import Profile, Sample
from shoestring.fleet.run.database import Database
from shoestring.fleet.run.runner import Runner
from shoestring.fleet.simulate.simulator import Settings, Simulation
from shoestring.fleet.simulate.throughputs import parse_throughputs
from shoestring.fleet.simulate.trace import TraceJob
from tests.unit.fleet.scripted import GIB, ScriptedEngine, cpu

KINDS = {"d0": "fast", "d1": "fast", "d2": "fast", "d3": "slow", "d4": "slow"}


def one(kind, *jobs, devices=1):
    return Placement(kind, jobs, devices, (1.0,) * len(jobs))


def test_jobs_stay_on_their_devices_and_others_get_devices_without_a_job_first():
    placements = [one("fast", "a"), one("fast", "b"), one("slow", "c", "d"), one("fast", "e")]
    places = place_jobs(placements, KINDS, {"b": ("d0",), "d": ("d4",), "e": ("d3",), "z": ("d1",)})
    assert places.devices == {"a": ("d2",), "b": ("d0",), "c": ("d4",), "d": ("d4",), "e": ("d1",)}
    assert places.starting == {"a", "c", "e"}
    assert places.leaving == {"e", "z"}


def test_no_device_is_given_twice_and_a_placement_without_enough_devices_gets_none():
    placements = [one("fast", "a", devices=2), one("fast", "b"), one("fast", "c"), one("other", "d")]
    places = place_jobs(placements, KINDS, {"c": ("d1",)})
    assert places.devices == {"c": ("d1",), "a": ("d0", "d2")}  # none is left for b


def test_a_pair_that_ran_apart_comes_together_on_the_device_of_its_first_job():
    places = place_jobs([one("fast", "a", "b")], KINDS, {"a": ("d2",), "b": ("d1",)})
    assert places.devices == {"a": ("d2",), "b": ("d2",)}
    assert (places.starting, places.leaving) == ({"b"}, {"b"})


def test_of_a_pair_that_parts_one_job_stays():
    places = place_jobs([one("fast", "a"), one("fast", "b")], KINDS, {"a": ("d1",), "b": ("d1",)})
    assert places.devices == {"a": ("d1",), "b": ("d0",)}


def test_a_job_that_stays_alone_goes_before_its_former_partner_with_a_new_one():
    has = {"a": ("d1",), "b": ("d1",)}
    places = place_jobs([one("fast", "new", "a"), one("fast", "b")], KINDS, has)
    assert places.devices == {"b": ("d1",), "new": ("d0",), "a": ("d0",)}


def test_devices_of_another_kind_or_number_and_lost_devices_are_not_kept():
    has = {"a": ("d3",), "b": ("d0",), "c": ("gone",)}
    places = place_jobs([one("fast", "a"), one("fast", "b", devices=2), one("slow", "c")], KINDS, has)
    assert places.devices == {"a": ("d1",), "b": ("d2", "d0"), "c": ("d4",)}
    assert places.starting == places.leaving == {"a", "b", "c"}


SPEEDS = {"('A', 1)": 10.0, "('B', 1)": 4.0, "('A', 2)": 18.0}
TABLE = parse_throughputs(
    {
        kind: {
            work: {
                "null": speed * part,
                **{
                    other: [0.8 * speed * part, 0.7 * SPEEDS[other] * part]
                    for other in SPEEDS
                    if other[-2] == work[-2]
                },
            }
            for work, speed in SPEEDS.items()
        }
        for kind, part in (("fast", 1.0), ("slow", 0.4))
    }
)
POOLS = [Pool("fast", 3), Pool("slow", 2)]
ENGINE_DEVICES = tuple(cpu(name, int(name[1]), kind=kind) for name, kind in KINDS.items())


def draw_jobs(seed):
    draw = random.Random(seed)
    arrivals = sorted(draw.uniform(0, 900) for _ in range(12))
    works = draw.choices([("A", 1), ("B", 1), ("A", 2)], k=12)
    return [
        TraceJob(n, work, draw.randint(300, 6000), devices, 1.0, None, arrival)
        for n, ((work, devices), arrival) in enumerate(zip(works, arrivals, strict=True))
    ]


def groups(devices):
    """Which jobs share devices: what stays the same however devices of one kind are named."""
    return {frozenset(job for job in devices if devices[job] == own) for own in devices.values()}


class SameRun:
    """A real runner on the jobs of a simulation, which is told the simulation's placements as its plan."""

    def __init__(self, folder, jobs):
        script = folder / "train.py"
        script.write_text("pass\n")
        self.database = Database(folder / "fleet")
        for devices in (1, 2):
            names = [str(job.number) for job in jobs if job.devices == devices]
            self.database.add([Job(n, str(script), batches=(8,), steps=10, devices=devices) for n in names])
        for kind in ("fast", "slow"):
            profile = Profile("", kind, (Sample(8, 0.1, 0.0, GIB, 1.0, 1.0, steps=9),))
            self.database.save_profile(self.database.entries()[0].key, kind, profile.to_json())
        self.engine = ScriptedEngine(ENGINE_DEVICES)
        self.placements = ()
        self.runner = Runner(
            self.database, self.engine, lambda *_: Plan(tuple(self.placements)), round_s=-1.0
        )

    def plan(self, estimates, last):
        return Plan(tuple(self.placements))

    def devices(self):
        return {name: life.devices for name, life in self.runner.lives.items()}

    def take(self, placements):
        """Bring the runner to a plan; return the jobs that had to stop."""
        self.placements = placements
        self.runner.look()
        asked = {name for name in self.runner.lives if self.engine.latest(name).is_asked}
        for name in asked:
            self.engine.latest(name).obey()
        self.runner.look()
        return asked

    def finish(self, names):
        for name in names:
            self.engine.latest(name).finish()

    def close(self):
        self.engine.close()
        self.database.close()


@pytest.mark.parametrize("seed", range(3))
def test_a_runner_and_a_simulation_keep_move_and_pair_the_same_jobs(seed, tmp_path):
    jobs = draw_jobs(seed)
    simulation = Simulation(jobs, TABLE, POOLS, Settings("jct", packing=True, round_s=100.0))
    real = SameRun(tmp_path, jobs)
    moved = 0
    while len(simulation.outcome.completion_s) < len(jobs):
        done, starts = set(simulation.outcome.completion_s), simulation.outcome.starts
        simulation.round()
        places = simulation.places
        assert real.take(simulation.placements) == places.leaving
        assert simulation.outcome.starts - starts == len(places.starting)
        assert groups(real.devices()) == groups(places.devices)
        kind_of = {job: place.kind for place in simulation.placements for job in place.jobs}
        assert {job: own[0].kind for job, own in real.devices().items()} == kind_of
        moved += len(places.leaving)
        real.finish(str(number) for number in set(simulation.outcome.completion_s) - done)
    assert moved > 0
    real.close()
