"""A confined process has its cores and its memory, and ends with the one that asked for it."""

import os
import signal
import subprocess
import sys

import psutil

from shoestring.fleet.engine.confine import confined
from tests.unit.launch.processes import wait_gone

CORE = min(os.sched_getaffinity(0))
LIMIT_S = 60


def run(command):
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_it_has_these_cores_and_no_others():
    script = "import os; print(*os.sched_getaffinity(0))"
    assert run(confined([sys.executable, "-c", script], cores=[CORE])) == [str(CORE)]


def test_memory_beyond_the_limit_is_refused_to_it():
    script = "try:\n  bytearray(1 << 30)\n  print('got it')\nexcept MemoryError:\n  print('refused')"
    command = [sys.executable, "-c", script]
    assert run(confined(command, memory_bytes=1 << 29)) == ["refused"]
    assert run(confined(command)) == ["got", "it"]


def test_it_becomes_the_command_with_its_arguments_and_exit_code():
    command = [sys.executable, "-c", "import sys; sys.exit(sys.argv[1:] == ['--cores', 'x'] and 7)"]
    done = subprocess.run([*confined(command, cores=[CORE]), "--cores", "x"], timeout=LIMIT_S)
    assert done.returncode == 7


PARENT = """
import subprocess, sys
from shoestring.fleet.engine.confine import confined

waiting = "print('up', flush=True); import signal; signal.pause()"
child = subprocess.Popen(confined([sys.executable, "-c", waiting]))
print(child.pid, flush=True)
child.wait()
"""


def test_it_ends_when_its_parent_is_killed():
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    try:
        child = psutil.Process(int(parent.stdout.readline()))
        assert parent.stdout.readline() == "up\n"
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait(LIMIT_S)
        parent.stdout.close()
    assert wait_gone([child]) == []
