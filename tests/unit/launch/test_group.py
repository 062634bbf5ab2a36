"""A script that opens a process group of torch's by itself finds one of all workers."""

import socket

import pytest

from shoestring.config import Run
from shoestring.launch.group import KeptPort, group_variables, some_port, without_torchruns
from tests.unit.launch.processes import run_command

RUN = Run(worker=5, workers=8, local=1, shards=("ipc:///a",))

# What scripts for torchrun do, and the sum over all ranks' own samples.
SCRIPT = """
import os
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
import shoestring

run = shoestring.init()
dist.init_process_group("gloo")
data = TensorDataset(torch.arange(10.0))
loader = DataLoader(data, batch_size=2, sampler=DistributedSampler(data, shuffle=False))
own = torch.cat([x for (x,) in loader])
total = own.sum()
dist.all_reduce(total)
print(run.worker, dist.get_rank(), dist.get_world_size(), os.environ["LOCAL_RANK"],
      os.environ["LOCAL_WORLD_SIZE"], own.tolist(), total.item(), flush=True)
dist.destroy_process_group()
"""

# Of another run: whoever starts this one sits in a shell or container that has such variables.
FOREIGN = {
    "RANK": "7",
    "WORLD_SIZE": "9",
    "LOCAL_RANK": "7",
    "LOCAL_WORLD_SIZE": "9",
    "GROUP_RANK": "3",
    "MASTER_ADDR": "192.0.2.1",
    "MASTER_PORT": "1",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RUN_ID": "other",
}


@pytest.mark.parametrize("given", [{}, FOREIGN], ids=["nothing", "another run's"])
def test_a_process_group_opens_whatever_the_environment_says(tmp_path, given):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    code, out, err = run_command("run", "--workers", "2", "--folder", tmp_path / "run", script, **given)
    assert code == 0, err
    assert sorted(line.removeprefix("[worker 1] ") for line in out.splitlines()) == [
        "0 0 2 0 2 [0.0, 2.0, 4.0, 6.0, 8.0] 45.0",
        "1 1 2 1 2 [1.0, 3.0, 5.0, 7.0, 9.0] 45.0",
    ]


def test_variables_are_those_of_torchrun():
    assert group_variables(RUN, 4, "10.0.0.1", 20_001) == {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "20001",
    }


def test_what_torchrun_told_the_launcher_is_left_out():
    own = {"HOME": "/root", "GROUP_NAME": "mine"}
    assert without_torchruns({**own, **FOREIGN}).keys() == own.keys() | {
        "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    }  # fmt: skip


def test_a_kept_port_is_for_who_says_so():
    kept = KeptPort()
    with socket.socket() as stranger, pytest.raises(OSError, match="Address already in use"):
        stranger.bind((kept.host, kept.port))
    with socket.socket() as store:
        store.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        store.bind((kept.host, kept.port))
        store.listen()
    kept.close()
    kept.close()


def test_a_port_for_another_host_is_none_that_its_kernel_hands_out():
    assert all(20_000 <= some_port() < 32_000 for _ in range(100))
