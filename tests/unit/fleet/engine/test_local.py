"""Tasks as real processes: what they see, how they end, and that none is left."""

import json
import os
import time

import psutil
import pytest

from shoestring.fleet.contract import STOPPED
from shoestring.fleet.engine.base import Task
from shoestring.fleet.engine.devices import Device
from shoestring.fleet.engine.local import LocalEngine, environment_of
from tests.unit.fleet.scripted import cpu
from tests.unit.launch.processes import wait_gone

CORE = min(os.sched_getaffinity(0))
LIMIT_S = 60.0


@pytest.fixture
def engine():
    found = LocalEngine([cpu("one", CORE)])
    yield found
    found.close()


def task(tmp_path, source, *arguments, **given):
    script = tmp_path / "script.py"
    script.write_text(source)
    given = {"devices": (cpu("one", CORE),), "folder": tmp_path / "task", **given}
    return Task("job", [str(script), *arguments], **given)


def wait(running):
    deadline = time.monotonic() + LIMIT_S
    while (code := running.poll()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return code


def output(tmp_path):
    return (tmp_path / "task" / "output.log").read_text()


def test_a_task_has_its_cores_threads_and_arguments(tmp_path, engine):
    source = """
import json, os, sys
names = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "SHOESTRING_RUN", "SHOESTRING_CHECKPOINT", "MINE")
print(json.dumps([sys.argv[1:], list(os.sched_getaffinity(0)), [os.environ.get(name) for name in names]]))
"""
    running = engine.start(
        task(tmp_path, source, "--batch", "8", environment={"MINE": "yes"}, checkpoint=tmp_path / "kept")
    )
    assert wait(running) == 0
    arguments, cores, values = json.loads(output(tmp_path))
    assert (arguments, cores) == (["--batch", "8"], [CORE])
    assert values == ["1", "", "job", str(tmp_path / "kept"), "yes"]


def test_exit_codes_are_as_a_shell_counts_them(tmp_path, engine):
    assert wait(engine.start(task(tmp_path, "raise SystemExit(3)"))) == 3
    assert (
        wait(engine.start(task(tmp_path, "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"))) == 137
    )


def test_output_of_all_lives_is_kept_in_order(tmp_path, engine):
    for text in ("first", "second"):
        assert wait(engine.start(task(tmp_path, f"print('{text}')"))) == 0
    assert output(tmp_path) == "first\nsecond\n"


WAIT_FOR_STOP = """
import os, sys, time
stop = os.environ["SHOESTRING_STOP"]
assert not os.path.exists(stop)
print("up", flush=True)
while not os.path.exists(stop):
    time.sleep(0.01)
sys.exit(int(os.environ["CODE"]))
"""


def test_a_task_learns_that_it_is_to_stop_and_its_next_life_is_not_told_so(tmp_path, engine):
    for _ in range(2):
        running = engine.start(task(tmp_path, WAIT_FOR_STOP, environment={"CODE": str(STOPPED)}))
        running.ask_stop()
        assert wait(running) in (STOPPED, 1)  # asked before it looked, or after
        running = engine.start(
            task(tmp_path, "import os; assert not os.path.exists(os.environ['SHOESTRING_STOP'])")
        )
        assert wait(running) == 0


FAMILY = """
import os, signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN) if sys.argv[1] == "stubborn" else None
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
print(os.getpid(), child.pid, flush=True)
signal.pause()
"""


def family(tmp_path):
    deadline = time.monotonic() + LIMIT_S
    path = tmp_path / "task" / "output.log"
    while not (path.exists() and path.read_text().endswith("\n")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return [psutil.Process(int(pid)) for pid in path.read_text().split()]


def test_closing_leaves_neither_tasks_nor_their_children(tmp_path, engine):
    engine.start(task(tmp_path, FAMILY, "mild"))
    processes = family(tmp_path)
    engine.close()
    assert wait_gone(processes) == []


def test_a_task_that_does_not_obey_is_killed_with_its_children(tmp_path, engine, monkeypatch):
    monkeypatch.setattr("shoestring.fleet.engine.local._KILL_S", 0.1)
    running = engine.start(task(tmp_path, FAMILY, "stubborn"))
    processes = family(tmp_path)
    running.kill()
    assert running.poll() == 137
    assert wait_gone(processes) == []


def test_a_task_of_several_devices_is_that_many_workers(tmp_path):
    engine = LocalEngine([cpu("one", CORE)])
    source = "from shoestring.launch.start import init; run = init(); print(run.worker, 'of', run.workers)"
    pair = (cpu("one", CORE), cpu("same", CORE))
    try:
        assert wait(engine.start(task(tmp_path, source, devices=pair))) == 0
    finally:
        engine.close()
    lines = output(tmp_path).splitlines()
    assert {line.removeprefix("[worker 1] ") for line in lines} >= {"0 of 2", "1 of 2"}


def test_a_gpu_is_seen_alone_and_its_memory_is_capped(tmp_path):
    gpus = tuple(Device(f"gpu{n}", "h200", 1 << 37, 1 << 37, uuid=f"GPU-{n}") for n in range(2))
    one = Task("job", ["x.py"], gpus[1:], tmp_path, memory_bytes=123)
    given = environment_of(one, tmp_path / "stop", {"CUDA_VISIBLE_DEVICES": "7", "RANK": "3", "HOME": "/h"})
    assert given["CUDA_VISIBLE_DEVICES"] == "GPU-1"
    assert given["SHOESTRING_MEMORY_BYTES"] == "123"
    assert given["HOME"] == "/h"
    assert "RANK" not in given
    assert "OMP_NUM_THREADS" not in given
    both = environment_of(Task("job", ["x.py"], gpus, tmp_path), tmp_path / "stop", {})
    assert both["CUDA_VISIBLE_DEVICES"] == "GPU-0,GPU-1"
    assert "SHOESTRING_MEMORY_BYTES" not in both
