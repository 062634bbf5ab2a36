"""A `TorchTrainer` whose workers exchange through shards: same bits as the local launcher, nothing left."""

import subprocess
import sys
from dataclasses import fields

import pytest
from ray.train.torch import TorchConfig

from shoestring.integrations.ray import ShoestringBackend, ShoestringConfig
from tests.unit.launch.processes import clean_environment, run_command
from tests.unit.launch.ray.rays import LIMIT_S, processes_of, ray_nodes

# What a user writes: the training function, and two lines for Ray Train.
TRAIN = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import shoestring

def train(report):
    torch.set_num_threads(1)
    run = shoestring.init()
    source = torch.Generator().manual_seed(5)
    data = TensorDataset(torch.randn(80, 6, generator=source), torch.randint(0, 3, (80,), generator=source))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 400), nn.ReLU(), nn.Linear(400, 3))
    model, optimizer = shoestring.wrap(model, torch.optim.Adam(model.parameters(), 0.01))
    for x, y in DataLoader(data, batch_sampler=shoestring.batches(data, 4, seed=9)):
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    report({"hash": optimizer.parameter_hash(), "steps": optimizer.steps, "workers": run.workers})
"""

LOCAL = TRAIN + "train(lambda found: shoestring.init().worker or print(found))\n"

RAY = (
    TRAIN
    + """
import pathlib, tempfile
import ray
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from shoestring.integrations.ray import ShoestringConfig

def report(found):
    with tempfile.TemporaryDirectory() as folder:
        pathlib.Path(folder, "found").write_text(str(found))
        is_first = ray.train.get_context().get_world_rank() == 0
        ray.train.report(found, checkpoint=Checkpoint.from_directory(folder) if is_first else None)

def work():
    train(report)

ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
trainer = TorchTrainer(
    work,
    torch_config=ShoestringConfig(codec="dct:step=1.5", checkpoint=sys.argv[2] + "/checkpoints", every=4),
    scaling_config=ScalingConfig(num_workers=2, placement_strategy="STRICT_SPREAD"),
    run_config=RunConfig(name="test", storage_path=sys.argv[2]),
)
result = trainer.fit()
with result.checkpoint.as_directory() as folder:
    print(pathlib.Path(folder, "found").read_text(), result.metrics["hash"])
"""
)


def test_its_fields_are_options_of_the_command():
    """A user of `shoestring run` finds the same names here; resources and storage are Ray Train's to say."""
    own = {field.name for field in fields(ShoestringConfig)} - {field.name for field in fields(TorchConfig)}
    assert own >= {"codec", "policy", "checkpoint", "every", "resume"}
    code, shown, err = run_command("run", "--help", COLUMNS="200")
    assert code == 0, err
    assert {f"--{name.replace('_', '-')}" for name in own} <= set(shown.split())
    assert ShoestringConfig().backend_cls is ShoestringBackend


@pytest.mark.slow
@pytest.mark.alone
def test_a_trainer_ends_with_the_bits_of_the_local_launcher(tmp_path):
    script = tmp_path / "local.py"
    script.write_text(LOCAL)
    code, local, err = run_command(
        *("run", "--workers", "2", "--shards", "2", "--codec", "dct:step=1.5", "--folder", tmp_path / "run"),
        script,
    )
    assert code == 0, err
    script = tmp_path / "train.py"
    script.write_text(RAY)
    with ray_nodes({}, {}) as nodes:
        done = subprocess.run(
            [sys.executable, str(script), nodes.address, str(tmp_path)],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            env=clean_environment() | nodes.environment,
        )
        assert done.returncode == 0, done.stderr
        assert not [process for process in processes_of(nodes.folder) if "serve" in process.cmdline()]
    # What was reported came through, as metrics and in Ray's own checkpoint.
    facts, _, metric = done.stdout.splitlines()[-1].rpartition(" ")
    assert [facts] == local.splitlines()
    assert metric in facts
    # Shards end behind their last checkpoint: the run's own checkpoints are beside Ray's.
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir())[-1] == "step-000000008"
