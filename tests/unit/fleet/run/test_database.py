"""The fleet's memory: all or nothing, one process that runs it, and nothing lost to SIGKILL."""

import signal
import sqlite3
import subprocess
import sys

import pytest

from shoestring.errors import FleetError
from shoestring.fleet.jobs import Job
from shoestring.fleet.run.database import Database, default_folder


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("pass\n")
    return str(path)


@pytest.fixture
def database(tmp_path):
    with Database(tmp_path / "fleet") as found:
        yield found


def test_jobs_are_listed_in_order_and_all_of_a_call_or_none(database, script):
    database.add([Job("b", script, steps=1), Job("a", script, steps=2)])
    with pytest.raises(FleetError, match="there is a job `a` already"):
        database.add([Job("c", script, steps=1), Job("a", script, steps=1)])
    assert [entry.job.name for entry in database.entries()] == ["b", "a"]
    assert database.entry("a").job == Job("a", script, steps=2)
    with pytest.raises(FleetError, match="there is no job `c`"):
        database.entry("c")


def test_a_change_is_in_the_history_with_what_was_true_then(database, script):
    database.add([Job("a", script, steps=10)])
    database.move("a", "running", device="fast", note="it is its turn", batch=8)
    database.tell("a", steps=6, note="going well", ends_at=5.0)
    entry = database.entry("a")
    assert (entry.state, entry.device, entry.batch, entry.steps) == ("running", "fast", 8, 6)
    assert (entry.note, entry.ends_at) == ("going well", 5.0)
    database.move("a", "stopped")
    database.move("a", "running", device="slow", batch=99)
    assert database.entry("a").batch == 8  # the first one stays
    database.tell("a", steps=3)
    assert database.entry("a").steps == 6  # steps are not untaken
    assert [(c.state, c.device, c.steps) for c in database.history("a")] == [
        ("queued", "", 0),
        ("running", "fast", 0),
        ("stopped", "", 6),
        ("running", "slow", 6),
    ]


def test_a_job_that_is_forgotten_leaves_no_trace(database, script):
    database.add([Job("a", script, steps=1), Job("b", script, steps=1)])
    database.forget("a")
    assert [entry.job.name for entry in database.entries()] == ["b"]
    assert {change.job for change in database.history()} == {"b"}
    database.move("a", "running")  # too late: it changes nothing
    assert {change.job for change in database.history()} == {"b"}


def test_what_was_measured_is_found_again(database):
    database.save_profile("key", "v100", "old")
    database.save_profile("key", "v100", "new")
    database.save_profile("key", "k80", "other")
    assert database.profiles("key") == {"v100": "new", "k80": "other"}
    assert database.profiles("else") == {}
    database.save_pair("v100", "a", "b", 0.5, 3.0)
    assert database.pairs() == {("v100", "a", "b"): (0.5, 3.0)}


def test_one_process_runs_a_fleet(database):
    assert not database.is_run()
    with database.hold(), Database(database.folder) as other:
        assert other.is_run()
        with pytest.raises(FleetError, match="another process runs"), other.hold():
            pass
    assert not database.is_run()


CHILD = """
import sys
from pathlib import Path
from shoestring.fleet.jobs import Job
from shoestring.fleet.run.database import Database

database = Database(Path(sys.argv[1]))
with database.hold():
    database.add([Job(name, sys.argv[2], steps=1) for name in ("a", "b")])
    database.move("a", "running", device="fast", batch=4)
    database._db.execute("begin immediate")  # it will die in the middle of a change
    database._db.execute("update jobs set state = 'done'")
    print("ready", flush=True)
    sys.stdin.read()
"""


def test_a_killed_process_loses_its_unfinished_change_alone(tmp_path, script):
    folder = tmp_path / "fleet"
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(folder), script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout.readline() == "ready\n"
        with sqlite3.connect(folder / "fleet.db") as reader:
            assert reader.execute("select state from jobs order by place").fetchall() == [
                ("running",),
                ("queued",),
            ]
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait(30)
        child.stdin.close()
        child.stdout.close()
    with Database(folder) as database, database.hold():  # the kernel let go of the lock
        assert [entry.state for entry in database.entries()] == ["running", "queued"]
        assert database.recover() == ["a"]
        assert database.entry("a").state == "stopped"
        assert database.entry("a").batch == 4
        assert database.recover() == []


def test_another_version_is_refused(tmp_path):
    Database(tmp_path).close()
    with sqlite3.connect(tmp_path / "fleet.db") as database:
        database.execute("pragma user_version=99")
    with pytest.raises(FleetError, match="version 99"):
        Database(tmp_path)


def test_a_file_that_is_no_database_is_refused(tmp_path):
    (tmp_path / "fleet.db").write_bytes(b"nothing of the kind" * 100)
    with pytest.raises(FleetError, match="cannot be opened"):
        Database(tmp_path)


def test_the_folder_is_where_state_belongs(monkeypatch, tmp_path):
    monkeypatch.delenv("SHOESTRING_FLEET", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "shoestring" / "fleet"
    monkeypatch.setenv("SHOESTRING_FLEET", str(tmp_path / "mine"))
    assert default_folder() == tmp_path / "mine"
