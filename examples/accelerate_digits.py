"""Train on scikit-learn's digits with Accelerate. `accelerate_digits.diff` is what Shoestring changes.

python examples/accelerate_digits.py --out digits
accelerate launch --cpu --num_processes 2 examples/accelerate_digits.py --out digits
"""

import argparse
import json
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--resume", type=Path)
arguments = parser.parse_args()

accelerator = Accelerator(
    gradient_accumulation_steps=2, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True)
)
set_seed(0)
images, labels = load_digits(return_X_y=True)
data = TensorDataset(torch.as_tensor(images / 16).float(), torch.as_tensor(labels))
train, test = torch.utils.data.random_split(data, [1536, 261])

model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, arguments.epochs * 48)
model, optimizer, scheduler, loader, test_loader = accelerator.prepare(
    model, optimizer, scheduler, DataLoader(train, 32, shuffle=True), DataLoader(test, 64)
)

begin, losses = 0, []
if arguments.resume:
    accelerator.load_state(arguments.resume)
    begin = int(arguments.resume.name.removeprefix("epoch-"))

for epoch in range(begin, arguments.epochs):
    loader.set_epoch(epoch)
    model.train()
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    accelerator.save_state(arguments.out / f"epoch-{epoch + 1}")

model.eval()
hits = []
for x, y in test_loader:
    hits.append(accelerator.gather_for_metrics(model(x).argmax(1) == y))
accuracy = torch.cat(hits).double().mean().item()
accelerator.print(f"accuracy {accuracy:.4f}")
accelerator.save_model(model, arguments.out)
if accelerator.is_main_process:
    (arguments.out / "losses.json").write_text(json.dumps(losses))
