"""Whatever ends a run on this machine, none of its processes is left."""

import os
import signal

import pytest

from shoestring.config import Run
from shoestring.errors import JoinError
from shoestring.launch.local import run_local
from shoestring.launch.outcome import Failure
from tests.unit.launch.processes import WAITING, Command, wait_gone


@pytest.fixture
def start(tmp_path):
    """Start two waiting workers and a shard, and return when both workers have joined."""
    script = tmp_path / "train.py"
    script.write_text(WAITING)

    def begin() -> Command:
        return Command("run", "--workers", "2", "--folder", tmp_path / "run", script, TMPDIR=str(tmp_path))

    return begin


def wait_ready(command: Command) -> None:
    assert sorted(command.read_line() for _ in range(2)) == ["[worker 1] ready 1 2", "ready 0 2"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_all_processes(start, tmp_path, number, code):
    with start() as command:
        wait_ready(command)
        children = command.note_children()
        assert len(children) == 3
        found, _, err = command.finish(number)
        assert found == code, err
        assert not wait_gone(children, 0.0)
    assert not list(tmp_path.glob("shoestring-*"))


def test_a_killed_launcher_leaves_no_process(start):
    with start() as command:
        wait_ready(command)
        children = command.note_children()
        assert len(children) == 3
        command.process.kill()
        assert not wait_gone(children)


def run_script(tmp_path, source, *args, workers=2, **settings):
    script = tmp_path / "train.py"
    script.write_text(source)
    run = Run(name="test", workers=workers, folder=tmp_path / "run", **settings)
    return run_local([str(script), *args], run, shards=1)


FAILING = """
import os, signal, subprocess, sys
if os.environ["SHOESTRING_WORKER"] == "0":
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    print(child.pid, flush=True)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        signal.pause()
while True:  # until worker 0 has started its child
    if os.path.exists(sys.argv[1]):
        break
print("the last line", file=sys.stderr)
sys.exit(7)
"""


def test_a_failing_worker_ends_the_run_with_its_code(tmp_path, capfd):
    source = FAILING.replace("    signal.signal(", "    open(sys.argv[1], 'w').close()\n    signal.signal(")
    outcome = run_script(tmp_path, source, str(tmp_path / "started"))
    assert outcome.failure == Failure("worker 1", 7, ("the last line",))
    # Worker 0 heeds no SIGTERM and has a child, which ends too.
    assert outcome.exit_codes == [128 + signal.SIGKILL, 7]
    out, err = capfd.readouterr()
    assert not os.path.exists(f"/proc/{int(out)}/exe")
    assert err == "[worker 1] the last line\n"


def test_a_killed_worker_counts_as_a_shell_counts(tmp_path):
    outcome = run_script(tmp_path, "import os; os.kill(os.getpid(), 9)", workers=1)
    assert outcome.failure == Failure("worker 0", 137, ())


def test_workers_are_told_their_run_and_share_the_cores(tmp_path, capfd, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    source = """
import os
from shoestring.config import Run
run = Run.here()
print(run.name, run.worker, run.workers, run.incarnation, len(run.shards), run.codec, run.folder.name)
print(int(os.environ["OMP_NUM_THREADS"]) * 2 <= max(2, len(os.sched_getaffinity(0))))
"""
    outcome = run_script(tmp_path, source, codec="int8")
    assert (outcome.failure, outcome.exit_codes) == (None, [0, 0])
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == sorted(
        ["test 0 2 1 1 int8 run", "True", "[worker 1] test 1 2 1 1 int8 run", "[worker 1] True"]
    )
    assert err == ""


def test_a_shard_that_cannot_start_is_told(tmp_path, capfd):
    with pytest.raises(JoinError, match="shard 0 ended with exit code 1 before it listened"):
        run_script(tmp_path, "", resume=tmp_path / "nothing")
    assert "[shard 0] error: there is no folder" in capfd.readouterr().err
