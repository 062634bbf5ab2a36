"""Every process of a run is killed at a random step; resumed, it ends with the same bits."""

import random
import signal

import pytest

from tests.unit.launch.processes import Command, run_command, wait_gone

STEPS, EVERY = 60, 8

TRAIN = f"""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import shoestring

torch.set_num_threads(1)
run = shoestring.init()
source = torch.Generator().manual_seed(5)
data = TensorDataset(torch.randn(160, 6, generator=source), torch.randint(0, 3, (160,), generator=source))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 400), nn.BatchNorm1d(400), nn.Dropout(0.1), nn.ReLU(), nn.Linear(400, 3))
model = shoestring.share_batchnorm(model)
model, optimizer = shoestring.wrap(model, torch.optim.Adam(model.parameters(), 0.01))
loader = DataLoader(data, batch_sampler=shoestring.batches(data, 4, seed=9))
for epoch in shoestring.epochs({STEPS} // 20):
    for x, y in loader:
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if run.worker == 0:
            print("step", optimizer.steps, flush=True)
if run.worker == 0:
    print("hash", optimizer.parameter_hash(), model[1].running_var.sum().item(), flush=True)
"""


def arguments(folder, script, shards, codec, *more):
    return (
        *("run", "--workers", "2", "--shards", shards, "--codec", codec),
        *("--checkpoint", folder, "--every", str(EVERY), *more, script),
    )


def end(output: str) -> list[str]:
    return [line.split(" ", 1)[1] for line in output.splitlines() if "hash " in line]


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["dct:step=1.5"])
def test_killed_as_a_whole_and_resumed_it_ends_with_the_same_bits(tmp_path, codec):
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    code, out, err = run_command(*arguments(tmp_path / "whole", script, "2", codec))
    assert code == 0, err
    whole = end(out)
    assert len(whole) == 1

    last = random.randrange(2 * EVERY + 2, STEPS - 2)
    folder = tmp_path / "killed"
    with Command(*arguments(folder, script, "2", codec)) as command:
        while (line := command.read_line()) and f"step {last}" not in line:
            pass
        assert f"step {last}" in line, command.finish()
        children = command.note_children()
        for process in (command.process, *children):
            process.send_signal(signal.SIGKILL)
        assert wait_gone(children) == []
    code, out, err = run_command(*arguments(folder, script, "3", codec, "--resume", "auto"))
    assert code == 0, f"killed after step {last}: {err}"
    assert end(out) == whole, f"killed after step {last}"
    assert "step 1\n" not in out  # it went on, rather than beginning again
