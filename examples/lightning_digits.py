"""Train on scikit-learn's digits with Lightning. `lightning_digits.diff` is what Shoestring changes.

python examples/lightning_digits.py --out digits
python examples/lightning_digits.py --out digits --devices 2
"""

import argparse
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--resume", type=Path)
parser.add_argument("--devices", type=int, default=1)
arguments = parser.parse_args()


class Digits(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch, index):
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_step=True, sync_dist=True)
        return loss

    def validation_step(self, batch, index):
        hits = (self.net(batch[0]).argmax(1) == batch[1]).float().mean()
        self.log("accuracy", hits, sync_dist=True, prog_bar=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)]


seed_everything(0)
images, labels = load_digits(return_X_y=True)
data = TensorDataset(torch.as_tensor(images / 16).float(), torch.as_tensor(labels))
train, test = torch.utils.data.random_split(data, [1536, 261])

trainer = Trainer(
    max_epochs=arguments.epochs,
    accumulate_grad_batches=2,
    gradient_clip_val=1.0,
    log_every_n_steps=1,
    logger=CSVLogger(arguments.out),
    callbacks=[ModelCheckpoint(arguments.out, "{epoch}", save_top_k=-1)],
    enable_progress_bar=False,
    devices=arguments.devices,
)
trainer.fit(Digits(), DataLoader(train, 32, shuffle=True), DataLoader(test, 64), ckpt_path=arguments.resume)
