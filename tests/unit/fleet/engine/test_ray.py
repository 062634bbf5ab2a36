"""The fleet on a real Ray cluster of three labelled nodes: placements as the local engine's, nothing left."""

import json
import os
import time
from types import SimpleNamespace

import pytest

from shoestring.errors import FleetError
from shoestring.fleet.engine.base import Task
from shoestring.fleet.engine.local import LocalEngine
from shoestring.fleet.engine.ray import Outpost, RayEngine, _Post, node_devices
from shoestring.fleet.jobs import Job
from shoestring.fleet.measure.profile import Profile, Sample
from shoestring.fleet.run.database import Database
from shoestring.fleet.run.planners import make_planner
from shoestring.fleet.run.runner import Runner
from tests.unit.fleet.scripted import GIB, cpu
from tests.unit.launch.ray.rays import RayCommand, processes_of, ray_nodes

CORE = min(os.sched_getaffinity(0))
SPEEDS = {"fast": 0.01, "middle": 0.02, "slow": 0.05}
STEPS = {"short": 100, "medium": 400, "long": 1600}

# As a worker does: it reports its steps. It ends at once, or when it is told to.
WORK = """
import os, pathlib, sys
from shoestring.observe.events import EventLog
log = EventLog(pathlib.Path(os.environ["SHOESTRING_FOLDER"]), "worker-0")
log.write("step", worker=0, step=int(sys.argv[1]))
print("on", sorted(os.sched_getaffinity(0)), "batch", os.environ["SHOESTRING_BATCH"])
"""


def test_labels_say_what_a_node_offers():
    labels = {"shoestring-cores": str(CORE), "shoestring-kind": "Fast One", "shoestring-share": "0.5"}
    (found,) = node_devices(labels, "node-1")
    assert (found.name, found.kind, found.cores, found.share) == ("node-1", "fast-one", (CORE,), 0.5)


def test_a_node_without_labels_offers_what_it_has():
    found = node_devices({}, "node-1")
    assert found
    assert all(device.name.startswith("node-1") for device in found)


def test_labels_that_cannot_be_are_told():
    with pytest.raises(FleetError, match="core 99999"):
        node_devices({"shoestring-cores": "99999"}, "node-1")
    assert Outpost().find({"shoestring-cores": "99999"}, "node-1")[1].startswith("core 99999")


def test_an_outpost_starts_follows_and_ends_tasks(tmp_path):
    (tmp_path / "train.py").write_text("import sys; sys.exit(int(sys.argv[1]))")
    post = Outpost()
    try:
        for number in (0, 3):
            task = Task(
                "job", [str(tmp_path / "train.py"), str(number)], (cpu("one", CORE),), tmp_path / "job"
            )
            assert post.start(number, task) == ""
        for number in (0, 3):
            while (code := post.poll(number)) is None:
                time.sleep(0.01)
            assert code == number
    finally:
        post.close()


# Prints how many samples this job decoded, and how many it found.
READ = """
import shoestring
class Numbers:
    def __len__(self): return 40
    def __getitem__(self, index): return index * index
data = shoestring.cached(Numbers(), name="numbers", version=1)
assert data.__getitems__(range(40)) == [index * index for index in range(40)]
print(data.counts.decoded, data.counts.taken)
"""


def test_jobs_on_a_node_share_the_cache_of_its_memory(tmp_path):
    """Processes that a node's actor starts: a sample is decoded once for all of them."""
    (tmp_path / "read.py").write_text(READ)
    post = Outpost()
    try:
        for number in range(2):
            task = Task(
                f"job-{number}",
                [str(tmp_path / "read.py")],
                (cpu("one", CORE),),
                tmp_path / f"job-{number}",
                environment={"SHOESTRING_CACHE": str(tmp_path / "cache")},
            )
            assert post.start(number, task) == ""
            while (code := post.poll(number)) is None:
                time.sleep(0.01)
            assert code == 0
    finally:
        post.close()
    said = [(tmp_path / f"job-{number}" / "output.log").read_text() for number in range(2)]
    assert said == ["40 0\n", "0 40\n"]


def test_neighbours_are_the_other_devices_of_the_node():
    engine = RayEngine(SimpleNamespace(nodes=list))  # a cluster without nodes
    engine._posts = {
        "first": _Post(None, (cpu("one"), cpu("two", 1))),
        "second": _Post(None, (cpu("three"),)),
    }
    assert engine.neighbours(cpu("one")) == [cpu("two", 1)]
    assert engine.neighbours(cpu("three")) == []
    assert list(engine.neighbours(cpu("gone"))) == []


@pytest.fixture
def database(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(WORK)
    with Database(tmp_path / "fleet") as found:
        found.add([Job(name, str(script), (str(n),), batches=(8,), steps=n) for name, n in STEPS.items()])
        for kind, step_s in SPEEDS.items():
            profile = Profile("", kind, (Sample(8, step_s, 0.0, GIB // 8, 1.0, 1.0, steps=9),))
            for entry in found.entries():
                found.save_profile(entry.key, kind, profile.to_json())
        yield found


def first_places(database: Database) -> dict[str, str]:
    changes = [change for change in database.history() if change.state == "running"]
    return {change.job: change.device for change in reversed(changes)}


@pytest.mark.slow
@pytest.mark.alone
def test_three_nodes_get_the_jobs_that_three_local_devices_would(database, tmp_path):
    engine = LocalEngine([cpu(kind, CORE) for kind in SPEEDS])
    with Database(tmp_path / "local") as local:
        local.add([entry.job for entry in database.entries()])
        for entry in database.entries():
            for kind, data in database.profiles(entry.key).items():
                local.save_profile(entry.key, kind, data)
        try:
            Runner(local, engine, make_planner("plan", "jct")).look()
            wanted = first_places(local)
        finally:
            engine.close()
    assert sorted(wanted.values()) == sorted(SPEEDS)

    labels = [
        {"shoestring-name": kind, "shoestring-kind": kind, "shoestring-cores": str(CORE)} for kind in SPEEDS
    ]
    given = ("fleet", "run", "--fleet", database.folder, "--json", "--on")
    with ray_nodes(*labels) as nodes:
        with RayCommand(nodes, *given, nodes.on) as command:
            code, out, err = command.finish()
        assert code == 0, err
        assert not [one for one in processes_of(nodes.folder) if str(tmp_path) in " ".join(one.cmdline())]
    assert first_places(database) == wanted
    for facts in json.loads(out):
        assert (facts["state"], facts["steps_done"]) == ("done", STEPS[facts["name"]])
        assert facts["why"]
        log = (database.job_folder(facts["name"]) / "output.log").read_text()
        assert log == f"on [{CORE}] batch 8\n"
