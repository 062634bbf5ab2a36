"""Processes are started as told, what they print comes back, and none is left."""

import json
import os
import signal
import sys
import threading

import psutil
import pytest

from shoestring.config import Run
from shoestring.launch.supervisor import Supervisor
from tests.unit.launch.processes import wait_gone

RUN = Run("test", worker=1, workers=2, shards=("ipc:///a",), incarnation=2)

# A process that has a child and does not listen to SIGTERM.
STUBBORN = """
import os, signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
print(os.getpid(), child.pid, flush=True)
while True: signal.pause()
"""


@pytest.fixture
def lines():
    return []


@pytest.fixture
def supervisor(lines):
    made = Supervisor(lambda child, line, is_err: lines.append((child.who, line, is_err)))
    yield made
    made.stop(0.0)


def start(supervisor, source, **given):
    return supervisor.start_worker(["-c", source], RUN, {**os.environ, **given})


def test_a_worker_is_told_its_run_and_what_it_prints_comes_back(supervisor, lines):
    source = """
import json, os, sys
from shoestring.config import Run
run = Run.here()
print(json.dumps([run.name, run.worker, run.incarnation, os.environ["MINE"], os.getpgrp() == os.getpid()]))
print("the end", file=sys.stderr)
sys.exit(3)
"""
    child = start(supervisor, source, MINE="yes")
    assert supervisor.next_ended(60.0) is child
    child.drain()
    assert (child.who, child.code, child.last_lines) == ("worker 1", 3, ("the end",))
    assert {who for who, _, _ in lines} == {"worker 1"}
    assert [json.loads(line) for _, line, is_err in lines if not is_err] == [["test", 1, 2, "yes", True]]
    assert [line for _, line, is_err in lines if is_err] == ["the end"]
    assert supervisor.next_ended(0.0) is None  # each is returned once


def test_stopping_ends_stubborn_processes_and_their_children(lines):
    said = threading.Semaphore(0)

    def show(child, line, is_err):
        lines.append(line)
        said.release()

    supervisor = Supervisor(show)
    children = [start(supervisor, STUBBORN) for _ in range(2)]
    assert [said.acquire(timeout=60.0) for _ in children] == [True, True]
    family = [psutil.Process(int(pid)) for line in lines for pid in line.split()]
    supervisor.stop(0.1)
    assert [child.code for child in children] == [128 + signal.SIGKILL] * 2
    assert wait_gone(family) == []
    supervisor.stop(0.1)  # again does no harm


def test_children_of_a_process_that_has_ended_are_ended(supervisor, lines):
    source = STUBBORN.replace("while True: signal.pause()", "os._exit(0)")
    child = start(supervisor, source)
    assert supervisor.next_ended(60.0) is child
    child.drain()
    family = [int(pid) for _, line, _ in lines for pid in line.split()]
    assert len(family) == 2
    assert wait_gone([psutil.Process(pid) for pid in family if psutil.pid_exists(pid)]) == []


def test_without_a_reader_they_print_where_this_process_does(capfd):
    supervisor = Supervisor()
    child = start(supervisor, "import sys; print('out'); print('err', file=sys.stderr)")
    assert child.ended.wait(60.0)
    assert capfd.readouterr() == ("out\n", "err\n")
    assert child.last_lines == ()
    supervisor.stop(0.0)


def test_a_supervisor_that_is_killed_takes_its_workers_along(tmp_path):
    source = f"""
import os, sys
from shoestring.config import Run
from shoestring.launch.supervisor import Supervisor
waiting = "import signal, shoestring; shoestring.init(); print('in', flush=True); signal.pause()"
supervisor = Supervisor(lambda child, line, is_err: print(child.process.pid, line, flush=True))
supervisor.start_worker(["-c", waiting], Run({str(tmp_path)!r}), os.environ)
sys.stdin.read()
"""
    with psutil.Popen([sys.executable, "-c", source], stdin=-1, stdout=-1, text=True) as launcher:
        pid, word = launcher.stdout.readline().split()
        assert word == "in"
        worker = psutil.Process(int(pid))
        launcher.kill()
    assert wait_gone([worker]) == []
