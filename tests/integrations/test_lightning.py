"""Lightning with `ShoestringStrategy`: the losses of its own `ddp`, also when resumed."""

import csv

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer

from shoestring.config import Run
from shoestring.errors import UsageError
from shoestring.integrations.lightning import ShoestringStrategy, _Environment
from shoestring.worker.module.shell import is_wrapped
from tests.integrations.launch import Example, run_ddp, run_shoestring

EXAMPLE = Example("lightning_digits")


def logged(folder):
    """What was logged, by step and name."""
    with (folder / "lightning_logs" / "version_0" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    return {
        (int(row["step"]), name): float(row[name])
        for row in rows
        for name in ("loss", "accuracy")
        if row[name]
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Four epochs under `ddp` and through Shoestring; the last two once more, resumed."""
    folder = tmp_path_factory.mktemp("lightning")
    script = EXAMPLE.changed(folder)
    run_ddp(EXAMPLE.plain, "--out", folder / "ddp", "--devices", 2)
    run_shoestring(script, "--out", folder / "own")
    run_shoestring(script, "--out", folder / "resumed", "--resume", folder / "own" / "epoch=1.ckpt")
    return folder


def test_a_script_changes_in_two_lines():
    assert EXAMPLE.changed_lines() == (0, 2)


def test_losses_and_accuracies_are_those_of_ddp(runs):
    own = logged(runs / "own")
    assert len(own) == 48 + 4
    assert own[47, "loss"] < 1 < 2 < own[0, "loss"]
    assert own == logged(runs / "ddp")


def test_a_resumed_run_goes_on_with_the_same_bits(runs):
    own = logged(runs / "own")
    assert logged(runs / "resumed") == {key: value for key, value in own.items() if key[0] >= 24}


def test_a_script_that_is_alone_trains_alone(tmp_path):
    """With the diff, but without a launcher: in this process, twice, and validated afterwards."""

    class Line(LightningModule):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(1, 1)

        def training_step(self, batch, index):
            return (self.net(batch[0]) ** 2).mean()

        validation_step = training_step

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    model = Line()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(4, 1)))
    trainer = Trainer(
        strategy=ShoestringStrategy(),
        max_epochs=1,
        logger=False,
        default_root_dir=tmp_path,
        enable_progress_bar=False,
        accelerator="cpu",
        devices=3,
    )
    assert (trainer.world_size, trainer.global_rank) == (1, 0)
    trainer.fit(model, loader)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, loader)
    assert trainer.global_step == 8
    assert is_wrapped(model)
    trainer.validate(model, loader, verbose=False)
    torch.distributed.destroy_process_group()


def test_what_only_ddp_can_do_is_refused():
    with pytest.raises(UsageError, match="unused parameters need no setting"):
        ShoestringStrategy(find_unused_parameters=True)


def test_workers_of_a_host_take_its_devices_in_turn():
    strategy = ShoestringStrategy(parallel_devices=[torch.device("cuda", 2), torch.device("cuda", 3)])
    found = []
    for local in range(3):
        strategy.cluster_environment = _Environment(Run(worker=local, workers=3, local=local))
        found.append(strategy.root_device.index)
    assert found == [2, 3, 2]
