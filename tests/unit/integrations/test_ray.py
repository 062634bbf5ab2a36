"""A `TorchTrainer` whose workers exchange through shards: same bits as the local launcher, nothing left."""

import subprocess
import sys
from pathlib import Path

import pytest

from shoestring.config import Run, settings
from shoestring.errors import UsageError
from shoestring.integrations.ray import ShoestringConfig
from tests.unit.launch.processes import clean_environment, run_command
from tests.unit.launch.ray.rays import LIMIT_S, processes_of, ray_nodes
from tests.unit.test_config import EXAMPLES

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


OWN = [one for one in settings(Run) if not one.about.is_told and one.name not in ("workers", "keys")]


def test_every_setting_of_a_run_is_one_of_the_configuration():
    values = {one.name: EXAMPLES[one.kind][0] for one in OWN}
    config = ShoestringConfig(**values)
    assert {one.name: getattr(config.run, one.name) for one in OWN} == values
    assert ShoestringConfig().run == Run(name="ray-train")
    assert ShoestringConfig(checkpoint="/a b/c").run.checkpoint == Path("/a b/c")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"evry": 5}, "no setting `evry`.*did you mean `every`"),
        ({"every": "often"}, "`every` is `often`"),
        ({"workers": 2}, "`workers` is not for `ShoestringConfig`"),
        ({"restarts": 2}, "`restarts` is not for `ShoestringConfig`"),
    ],
)
def test_what_is_no_setting_of_its_own_is_refused(given, message):
    with pytest.raises(UsageError, match=message):
        ShoestringConfig(**given)


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
