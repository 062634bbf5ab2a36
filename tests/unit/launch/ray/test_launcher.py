"""Runs on a real Ray cluster of three nodes on this machine: same bits, losses survived, nothing left."""

import json
import os
import re
import signal
from pathlib import Path

import psutil
import pytest

from tests.unit.launch.processes import WAITING, Command, run_command, wait_gone
from tests.unit.launch.ray.rays import RayCommand, RayNodes, processes_of, ray_nodes

STEPS, EVERY, PAUSED = 60, 8, 27
RESUMED = r"going on from step (8|16|24|32|40|48|56), "

# One worker pauses in the middle of training, when a checkpoint is complete, and in its first life only:
# it opens a pipe that nobody writes to.
TRAIN = f"""
import glob, os, sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import shoestring

torch.set_num_threads(1)
run = shoestring.init()
paused, folder = int(sys.argv[1]), sys.argv[2]
source = torch.Generator().manual_seed(5)
data = TensorDataset(torch.randn(240, 6, generator=source), torch.randint(0, 3, (240,), generator=source))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 400), nn.Dropout(0.1), nn.ReLU(), nn.Linear(400, 3))
model, optimizer = shoestring.wrap(model, torch.optim.Adam(model.parameters(), 0.01))
loader = DataLoader(data, batch_sampler=shoestring.batches(data, 4, seed=9))
print("from", optimizer.steps, "in start", run.incarnation, flush=True)
for epoch in shoestring.epochs({STEPS} // 20):
    for x, y in loader:
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        is_due = run.worker == paused and optimizer.steps >= {PAUSED}
        is_first_life = not os.path.exists(folder + "/paused")
        if is_due and is_first_life and glob.glob(folder + "/checkpoints/*/manifest.json"):
            open(folder + "/paused", "w").close()
            print("paused", os.getpid(), flush=True)
            open(folder + "/pipe")
if run.worker == 0:
    print("hash", optimizer.parameter_hash(), flush=True)
"""


@pytest.fixture(scope="module")
def cluster():
    with ray_nodes({}, {}, {}) as nodes:
        yield nodes


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(TRAIN)
    os.mkfifo(tmp_path / "pipe")
    return path


def training(nodes: RayNodes | None, folder: Path, *more, workers=3, paused=-1):
    return (
        *("run", "--workers", str(workers), "--codec", "dct:step=1.5", "--folder", folder / "run"),
        *(() if nodes is None else ("--on", nodes.on)),
        *(*more, folder / "train.py", str(paused), folder),
    )


def hashes(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("hash ")]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What the same script ends with on this machine, by the local launcher."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "train.py").write_text(TRAIN)
    code, out, err = run_command(*training(None, folder, "--shards", "2"))
    assert code == 0, err
    assert len(hashes(out)) == 1
    return hashes(out)


def run_on(nodes: RayNodes, *args) -> tuple[int, str, str]:
    with RayCommand(nodes, *args) as command:
        return command.finish()


@pytest.mark.slow
@pytest.mark.alone
def test_three_nodes_end_with_the_bits_of_one_machine(cluster, script, tmp_path, whole):
    command = training(cluster, tmp_path, "--json")
    code, out, err = run_on(cluster, *command)
    assert code == 0, err
    assert hashes(out) == whole
    assert "3 workers and 3 shards on 3 Ray nodes" in err
    summary = json.loads(out.splitlines()[-1])
    assert (summary["exit_codes"], summary["failed"], summary["joined"]) == ([0, 0, 0], None, 3)
    assert list(cluster.folder.glob("shoestring-*")) == []  # keys and all
    logs = {path.name for path in (tmp_path / "run").glob("events-*.jsonl")}
    assert logs == {f"events-{who}-{n}.jsonl" for who in ("worker", "shard") for n in range(3)}


@pytest.mark.slow
@pytest.mark.alone
def test_a_killed_worker_is_started_again_and_joins(cluster, script, tmp_path):
    checkpoints = ("--checkpoint", tmp_path / "checkpoints", "--every", str(EVERY))
    command = training(cluster, tmp_path, "--shards", "1", *checkpoints, workers=2, paused=1)
    with RayCommand(cluster, *command) as run:
        pid = next_pause(run)
        os.kill(pid, signal.SIGKILL)
        code, out, err = run.finish()
    assert code == 0, err
    assert "worker 1 was killed by signal 9: it is started again" in err
    assert re.search(r"\[worker 1\] shoestring: " + RESUMED, err)
    # What it said in its first start was read above.
    assert re.findall(r"^\[worker 1\] from .* in start (\d+)$", out, re.MULTILINE) == ["2"]
    assert len(hashes(out)) == 1


def next_pause(run: Command) -> int:
    """Wait until a worker pauses; return its process."""
    while line := run.read_line():
        words = line.removeprefix("[worker 1] ").removeprefix("[worker 2] ").split()
        if words[0] == "paused":
            return int(words[1])
    raise AssertionError(run.finish())


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_a_driver_that_ends_leaves_its_cluster_and_nothing_else(cluster, tmp_path, number, code):
    script = tmp_path / "train.py"
    script.write_text(WAITING.replace('"ready"', '"ready", __import__("os").getpid()'))
    before = {process.pid for process in processes_of(cluster.folder)}
    with RayCommand(
        *(
            cluster,
            "run",
            "--on",
            cluster.on,
            "--workers",
            "2",
            "--shards",
            "1",
            "--folder",
            tmp_path / "run",
        ),
        script,
    ) as run:
        lines = [run.read_line() for _ in range(2)]
        workers = [psutil.Process(int(line.removeprefix("[worker 1] ").split()[1])) for line in lines]
        shards = [process for process in processes_of(cluster.folder) if "serve" in process.cmdline()]
        assert len(shards) == 1
        found, _, err = run.finish(number)
        assert found == code, err
        assert wait_gone([*workers, *shards]) == []
    assert before <= {process.pid for process in processes_of(cluster.folder)}


@pytest.mark.slow
@pytest.mark.alone
def test_a_folder_and_a_variable_go_along_and_the_exit_code_comes_back(cluster, tmp_path):
    code = tmp_path / "code"
    code.mkdir()
    (code / "beside.py").write_text("CODE = 7\n")
    (code / "train.py").write_text(
        "import beside, os, sys; print(os.getcwd(), os.environ['MINE']); sys.exit(beside.CODE)"
    )
    given = ("--working-dir", code, "--env", "MINE", "--folder", tmp_path / "run", "train.py")
    with RayCommand(cluster, "run", "--on", cluster.on, "--workers", "1", *given, MINE="yes") as run:
        found, out, err = run.finish()
    assert found == 7, err
    assert "worker 0 ended with exit code 7" in err
    where, mine = out.split()
    assert (Path(where) != code, mine) == (True, "yes")  # a copy that Ray made


@pytest.mark.slow
@pytest.mark.alone
def test_a_scripts_own_process_group_opens_across_nodes(cluster, tmp_path):
    (tmp_path / "train.py").write_text("""
import shoestring, torch, torch.distributed as dist

run = shoestring.init()
dist.init_process_group("gloo")
total = torch.tensor(run.worker + 1.0)
dist.all_reduce(total)
print("total", dist.get_rank() == run.worker, total.item(), flush=True)
dist.destroy_process_group()
""")
    code, out, err = run_on(cluster, *training(cluster, tmp_path))
    assert code == 0, err
    assert sorted(line.rpartition("] ")[2] for line in out.splitlines()) == ["total True 6.0"] * 3


# The last of this file, as it takes a node away.
@pytest.mark.slow
@pytest.mark.alone
def test_a_lost_node_costs_no_bit_and_a_new_one_is_used(cluster, script, tmp_path, whole):
    checkpoints = ("--checkpoint", tmp_path / "checkpoints", "--every", str(EVERY))
    command = training(cluster, tmp_path, *checkpoints, paused=0)
    with RayCommand(cluster, *command) as run:
        next_pause(run)
        cluster.kill(2)
        code, out, err = run.finish()
    assert code == 0, err
    assert "is gone: starting all workers and shards again" in err
    assert re.search(RESUMED, err)
    assert "3 workers and 2 shards on 2 Ray nodes" in err
    assert hashes(out) == whole

    cluster.add()
    (tmp_path / "train.py").write_text("print('trained')")
    code, out, err = run_on(cluster, *training(cluster, tmp_path))
    assert (code, out.count("trained")) == (0, 3)
    assert "warning: all 3 workers ran the script each by itself" in err
    assert "3 workers and 3 shards on 3 Ray nodes" in err
