"""A script with an ordinary loader, stopped and resumed, ends with the bits of one that never stopped."""

from pathlib import Path

import pytest

from tests.unit.launch.processes import run_command

TRAIN = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import shoestring

torch.set_num_threads(1)
run = shoestring.init()
source = torch.Generator().manual_seed(5)
data = TensorDataset(torch.randn(90, 6, generator=source), torch.randint(0, 3, (90,), generator=source))
loader = shoestring.split(DataLoader(data, batch_size=4, shuffle=True))
check = shoestring.split(DataLoader(data, batch_size=30))
torch.manual_seed(run.worker)
model = nn.Sequential(nn.Linear(6, 40), nn.Dropout(0.2), nn.ReLU(), nn.Linear(40, 3))
model, optimizer = shoestring.wrap(model, torch.optim.Adam(model.parameters(), 0.01))
print("from", optimizer.steps, flush=True)
for epoch in shoestring.epochs(3):
    for x, y in loader:
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if optimizer.steps == int(sys.argv[1]):
            sys.exit()
        if optimizer.steps % 5 == 0:  # amid the epoch
            with torch.no_grad():
                model.eval()
                [model(x) for x, _ in check]
                model.train()
print("end", optimizer.steps, optimizer.parameter_hash(), flush=True)
"""


def train(folder: Path, name: str, stop_after: int) -> list[str]:
    script = folder / "train.py"
    script.write_text(TRAIN)
    code, out, err = run_command(
        *("run", "--workers", "2", "--codec", "float32", "--folder", folder / "run"),
        *("--checkpoint", folder / name, "--every", "7", script, str(stop_after)),
    )
    assert code == 0, err
    return sorted(line.removeprefix("[worker 1] ") for line in out.splitlines())


@pytest.mark.slow
def test_a_resumed_script_ends_with_the_same_bits(tmp_path: Path) -> None:
    whole = train(tmp_path, "whole", -1)
    assert whole[0].startswith("end 36 ")
    assert train(tmp_path, "cut", 25) == ["from 0"] * 2
    resumed = train(tmp_path, "cut", -1)
    assert resumed[2:] == ["from 21"] * 2
    assert resumed[:2] == whole[:2]
