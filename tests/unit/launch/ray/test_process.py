"""A node's process without Ray: its process is started as ordered, followed to its end, and gone with it."""

import fcntl
import json
import os
import shutil
import signal
from dataclasses import replace

import psutil
import pytest

from shoestring.config import Run
from shoestring.launch.ray.process import NodeProcess, ProcessSpec
from shoestring.launch.shard import ShardArguments
from tests.unit.launch.processes import wait_gone

RUN = Run(name="test", worker=1, workers=2, shards=("tcp://10.0.0.1:7",))
SECRET = b"not to be seen"


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Start a script; what it starts ends with the test."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    started = []

    def begin(source: str, **given) -> NodeProcess:
        (tmp_path / "script.py").write_text(source)
        command = (str(tmp_path / "script.py"), "argument")
        started.append(NodeProcess(ProcessSpec(RUN, command, **given)))
        return started[-1]

    yield begin
    for one in started:
        one.stop(0.0)
        one.close()
    assert list(tmp_path.glob("shoestring-*")) == []


def follow(process: NodeProcess):
    """Take all reports up to the end: lines, events, the last report."""
    lines, events = [], []
    while True:
        report = process.poll(30.0)
        lines += report.lines
        events += report.events
        if report.code is not None:
            return lines, events, report


def test_a_worker_is_told_its_run_and_what_it_prints_is_passed_on(start):
    source = """
import json, os, sys
from shoestring.config import Run
run = Run.here()
names = ("OMP_NUM_THREADS", "MINE", "SHOESTRING_STRAY")
print(json.dumps([run.name, run.worker, run.shards, sys.argv[1:], [os.environ.get(n) for n in names]]))
for n in range(3): print("line", n, file=sys.stderr)
sys.exit(5)
"""
    os.environ["SHOESTRING_STRAY"] = "of another run"
    try:
        lines, _, report = follow(start(source, threads=3, environment={"MINE": "yes"}))
    finally:
        del os.environ["SHOESTRING_STRAY"]
    out = [text for text, is_err in lines if not is_err]
    assert json.loads(out[0]) == ["test", 1, ["tcp://10.0.0.1:7"], ["argument"], ["3", "yes", None]]
    assert [text for text, is_err in lines if is_err] == ["line 0", "line 1", "line 2"]
    assert (report.code, report.last_lines) == (5, ("line 0", "line 1", "line 2"))


def test_keys_are_for_this_user_alone_and_are_not_shown(start):
    source = """
import json, os, pathlib
folder = pathlib.Path(os.environ["SHOESTRING_KEYS"])
print(json.dumps({p.name: [oct(p.stat().st_mode & 0o777), p.read_text()] for p in folder.iterdir()}))
print(json.dumps([oct(p.stat().st_mode & 0o777) for p in (folder, folder.parent)]))
"""
    spec = ProcessSpec(RUN, keys={"worker-1.secret": SECRET})
    assert SECRET.decode() not in repr(spec)
    lines, _, _ = follow(start(source, keys=spec.keys))
    assert json.loads(lines[0][0]) == {"worker-1.secret": ["0o600", SECRET.decode()]}
    assert json.loads(lines[1][0]) == ["0o700", "0o700"]


def test_a_key_is_written_nowhere_else(start, tmp_path):
    follow(start("", keys={"../../outside.secret": SECRET}))
    assert not (tmp_path / "outside.secret").exists()


def test_events_come_with_the_reports(start):
    source = """
import os, pathlib
from shoestring.observe.events import EventLog
log = EventLog(pathlib.Path(os.environ["SHOESTRING_FOLDER"]), "worker-1")
for n in range(3): log.write("step", step=n)
"""
    _, events, _ = follow(start(source))
    assert [(event["who"], event["event"], event["step"]) for event in events] == [
        ("worker-1", "step", n) for n in range(3)
    ]


FAMILY = """
import os, signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
print(os.getpid(), child.pid, flush=True)
while True: signal.pause()
"""


def test_stopping_ends_a_stubborn_process_and_its_children(start):
    process = start(FAMILY)
    family = [psutil.Process(int(pid)) for pid in process.poll(30.0).lines[0][0].split()]
    process.stop(0.1)
    assert wait_gone(family) == []
    assert process.poll(1.0).code == 128 + signal.SIGKILL


def test_a_chatty_process_is_read_whole(start):
    lines, _, report = follow(start("for n in range(25_000): print(n)"))
    assert [text for text, _ in lines] == [str(n) for n in range(25_000)]
    assert report.code == 0


def test_what_a_killed_actor_left_is_removed_and_what_is_in_use_is_not(start, tmp_path):
    left, used, fresh = (tmp_path / f"shoestring-process-{name}" for name in ("left", "used", "fresh"))
    for folder in (left, used, fresh):
        folder.mkdir()
        (folder / "lock").touch()
    for folder in (left, used):
        os.utime(folder, (0, 0))
    with (used / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        follow(start(""))
        assert [folder.exists() for folder in (left, used, fresh)] == [False, True, True]
    for folder in (used, fresh):
        shutil.rmtree(folder)


def test_a_shard_says_where_it_listens(tmp_path):
    shard = NodeProcess(ProcessSpec(RUN, shard=ShardArguments(0, 1, RUN, "")))
    try:
        address, message, _ = shard.address()
        assert (address[:6], message) == ("ipc://", "")
    finally:
        shard.stop(30.0)
        assert shard.poll(5.0).code == 0
        shard.close()


def test_a_shard_that_cannot_start_says_why(tmp_path):
    run = replace(RUN, resume=tmp_path / "nothing")
    shard = NodeProcess(ProcessSpec(run, shard=ShardArguments(0, 1, run, "")))
    try:
        address, message, hint = shard.address()
        assert address == ""
        assert message.startswith("shard 0 ended with exit code 1 before it listened")
        assert hint
        lines, _, _ = follow(shard)
        assert any("there is no folder" in text for text, _ in lines)
    finally:
        shard.stop(5.0)
        shard.close()
