"""Workers that torchrun has started find each other, and their host's shard."""

import subprocess
import sys

import pytest

from shoestring.errors import UsageError
from shoestring.launch import torchrun
from shoestring.launch.rendezvous import Place
from tests.unit.launch.processes import LIMIT_S, clean_environment

WORKER = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "first",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RUN_ID": "job",
    "TORCHELASTIC_RESTART_COUNT": "2",
}

SCRIPT = """
import os, shoestring, torch

here = shoestring.init()
model = torch.nn.Linear(4, 2)
model, optimizer = shoestring.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), codec="int8")
for step in range(3):
    model(torch.ones(1, 4) * (here.worker + 1)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
# One write: both workers have the same pipe.
os.write(1, f"worker {here.worker} {here.workers} {len(here.shards)} {model.weight.sum().item()}\\n".encode())
"""


def test_place():
    assert torchrun.place(WORKER) == Place("job", 3, 4, 1, 1, 2, "first", 29500, False, 2)


def test_the_first_worker_provides_a_store_where_torchrun_does_not():
    alone = {name: value for name, value in WORKER.items() if not name.startswith("TORCHELASTIC")}
    assert not torchrun.place(alone).hosts_store
    assert torchrun.place(alone | {"RANK": "0"}).hosts_store


@pytest.mark.parametrize("change", [{"MASTER_PORT": "x"}, {"LOCAL_WORLD_SIZE": "0"}])
def test_a_broken_environment_is_an_error(change):
    with pytest.raises(UsageError, match="looks like torchrun's"):
        torchrun.place(WORKER | change)


def test_workers_train_together(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script]
    environment = clean_environment() | {"TMPDIR": str(tmp_path)}
    # Returns when the last process that holds the pipes has ended: the shard too.
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=environment)
    assert done.returncode == 0, done.stderr
    first, second = sorted(line.split() for line in done.stdout.splitlines())
    assert first[:4] == ["worker", "0", "2", "1"]
    assert second[:4] == ["worker", "1", "2", "1"]
    assert first[4] == second[4]
    assert not list(tmp_path.glob("shoestring-*"))
