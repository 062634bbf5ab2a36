"""A seat on its own: its process is started as ordered, followed to its end, and gone with it."""

import fcntl
import json
import os
import shutil
import signal

import psutil
import pytest

from shoestring.config import Run
from shoestring.launch.ray.process import Order, Seat
from shoestring.launch.shard import ShardOrder
from tests.unit.launch.processes import wait_gone

RUN = Run(name="test", worker=1, workers=2, shards=("tcp://10.0.0.1:7",))
SECRET = b"not to be seen"


@pytest.fixture
def sit(tmp_path, monkeypatch):
    """Seat a script; what it starts ends with the test."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    seats = []

    def seat(source: str, **given) -> Seat:
        (tmp_path / "script.py").write_text(source)
        seats.append(Seat(Order(RUN, (str(tmp_path / "script.py"), "argument"), **given)))
        return seats[-1]

    yield seat
    for one in seats:
        one.stop(0.0)
        one.close()
    assert list(tmp_path.glob("shoestring-*")) == []


def follow(seat: Seat):
    """Take all reports up to the end: lines, events, the last report."""
    lines, events = [], []
    while True:
        report = seat.poll(30.0)
        lines += report.lines
        events += report.events
        if report.code is not None:
            return lines, events, report


def test_a_worker_is_told_its_run_and_what_it_prints_is_passed_on(sit):
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
        lines, _, report = follow(sit(source, threads=3, environment={"MINE": "yes"}))
    finally:
        del os.environ["SHOESTRING_STRAY"]
    out = [text for text, is_err in lines if not is_err]
    assert json.loads(out[0]) == ["test", 1, ["tcp://10.0.0.1:7"], ["argument"], ["3", "yes", None]]
    assert [text for text, is_err in lines if is_err] == ["line 0", "line 1", "line 2"]
    assert (report.code, report.last_lines) == (5, ("line 0", "line 1", "line 2"))


def test_keys_are_for_this_user_alone_and_are_not_shown(sit):
    source = """
import json, os, pathlib
folder = pathlib.Path(os.environ["SHOESTRING_KEYS"])
print(json.dumps({p.name: [oct(p.stat().st_mode & 0o777), p.read_text()] for p in folder.iterdir()}))
print(json.dumps([oct(p.stat().st_mode & 0o777) for p in (folder, folder.parent)]))
"""
    order = Order(RUN, keys={"worker-1.secret": SECRET})
    assert SECRET.decode() not in repr(order)
    lines, _, _ = follow(sit(source, keys=order.keys))
    assert json.loads(lines[0][0]) == {"worker-1.secret": ["0o600", SECRET.decode()]}
    assert json.loads(lines[1][0]) == ["0o700", "0o700"]


def test_a_key_is_written_nowhere_else(sit, tmp_path):
    follow(sit("", keys={"../../outside.secret": SECRET}))
    assert not (tmp_path / "outside.secret").exists()


def test_events_come_with_the_reports(sit):
    source = """
import os, pathlib
from shoestring.observe.events import EventLog
log = EventLog(pathlib.Path(os.environ["SHOESTRING_FOLDER"]), "worker-1")
for n in range(3): log.write("step", step=n)
"""
    _, events, _ = follow(sit(source))
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


def test_stopping_ends_a_stubborn_process_and_its_children(sit):
    seat = sit(FAMILY)
    family = [psutil.Process(int(pid)) for pid in seat.poll(30.0).lines[0][0].split()]
    seat.stop(0.1)
    assert wait_gone(family) == []
    assert seat.poll(1.0).code == 128 + signal.SIGKILL


def test_a_chatty_process_is_read_whole(sit):
    lines, _, report = follow(sit("for n in range(25_000): print(n)"))
    assert [text for text, _ in lines] == [str(n) for n in range(25_000)]
    assert report.code == 0


def test_what_a_killed_seat_left_is_removed_and_what_is_in_use_is_not(sit, tmp_path):
    left, used, fresh = (tmp_path / f"shoestring-seat-{name}" for name in ("left", "used", "fresh"))
    for folder in (left, used, fresh):
        folder.mkdir()
        (folder / "lock").touch()
    for folder in (left, used):
        os.utime(folder, (0, 0))
    with (used / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        follow(sit(""))
        assert [folder.exists() for folder in (left, used, fresh)] == [False, True, True]
    for folder in (used, fresh):
        shutil.rmtree(folder)


def test_a_shard_says_where_it_listens(tmp_path):
    seat = Seat(Order(RUN, shard=ShardOrder(0, 1, "test", "")))
    try:
        address, message, _ = seat.address()
        assert (address[:6], message) == ("ipc://", "")
    finally:
        seat.stop(30.0)
        assert seat.poll(5.0).code == 0
        seat.close()


def test_a_shard_that_cannot_start_says_why(tmp_path):
    seat = Seat(Order(RUN, shard=ShardOrder(0, 1, "test", "", resume=tmp_path / "nothing")))
    try:
        address, message, hint = seat.address()
        assert address == ""
        assert message.startswith("shard 0 ended with exit code 1 before it listened")
        assert hint
        lines, _, _ = follow(seat)
        assert any("there is no folder" in text for text, _ in lines)
    finally:
        seat.stop(5.0)
        seat.close()
