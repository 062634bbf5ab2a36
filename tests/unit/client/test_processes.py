"""A run of the command line, and a follower that finds it by its folder."""

import json
import time

import pytest

from shoestring.client.follow import follow
from shoestring.errors import UsageError
from tests.unit.launch.processes import Command

LIMIT_S = 120.0
TRAIN = """
import json, pathlib, sys
import torch
import shoestring

run = shoestring.init()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 500), torch.nn.ReLU(), torch.nn.Linear(500, 60))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
model, optimizer = shoestring.wrap(model, optimizer, codec="dct", policy="every")
hashes = {0: optimizer.parameter_hash()}
torch.manual_seed(run.worker)
go_on = pathlib.Path(sys.argv[1], "go-on")
while not go_on.exists():
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    hashes[optimizer.driver.rounds] = optimizer.parameter_hash()
pathlib.Path(sys.argv[1], f"hashes-{run.worker}.json").write_text(json.dumps(hashes))
"""


@pytest.mark.slow
def test_a_run_in_processes_is_followed_by_its_folder(tmp_path):
    script, folder = tmp_path / "train.py", tmp_path / "run"
    script.write_text(TRAIN)
    found = {}
    command = Command("run", "--workers", "2", "--shards", "2", "--folder", folder, script, tmp_path)
    with command:
        with follow_soon(folder) as follower:
            for version in follower:
                found[version.round] = version.parameter_hash()
                if len(found) == 20:
                    (tmp_path / "go-on").touch()
        code, _, err = command.finish(None)
    assert code == 0, err
    with pytest.raises(UsageError, match="has ended"):
        follow(folder)
    # A worker that was told to stop later may have made a round by itself.
    own = [json.loads((tmp_path / f"hashes-{worker}.json").read_text()) for worker in range(2)]
    assert {seq: {**own[0], **own[1]}.get(str(seq)) for seq in found} == found
    assert all(own[0][seq] == own[1][seq] for seq in own[0].keys() & own[1].keys())


def follow_soon(folder):
    """Follow the run in a folder, once its shards listen."""
    limit = time.monotonic() + LIMIT_S
    while True:
        try:
            return follow(folder)
        except UsageError:
            assert time.monotonic() < limit
            time.sleep(0.01)
