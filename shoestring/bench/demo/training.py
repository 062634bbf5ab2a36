"""The script that every worker of `shoestring demo` runs: a small residual net on digits.

What matters is the lines with `shoestring`; the rest is a plain training loop. The result
goes into the folder named on the command line.
"""

import json
import math
import sys
import time
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import shoestring
from shoestring.bench.codec.training import ResidualBlock

STEPS = 150
BATCH = 64
_TRAINED_ON = 1200
_WIDTHS = (20, 48, 112)


def build_net() -> nn.Module:
    """About 207,000 parameters, BatchNorm after every convolution."""
    first, second, third = _WIDTHS
    return nn.Sequential(
        nn.Conv2d(1, first, 3, 1, 1, bias=False),
        nn.BatchNorm2d(first),
        nn.ReLU(),
        ResidualBlock(first, first, 1),
        ResidualBlock(first, second, 2),
        ResidualBlock(second, third, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(third, 10),
    )


def split_digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The images and classes to train on, then those to test with: the same split in every process."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    x = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1)[order] / 16
    y = torch.tensor(digits.target)[order]
    return x[:_TRAINED_ON], y[:_TRAINED_ON], x[_TRAINED_ON:], y[_TRAINED_ON:]


def main(folder: Path) -> None:
    world = shoestring.init()
    torch.manual_seed(0)
    x, y, test_x, test_y = split_digits()
    model = build_net()
    sgd = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=5e-4)
    model, optimizer = shoestring.wrap(model, sgd)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 20) * 0.5 * (1 + math.cos(math.pi * step / STEPS))
    )
    loader = shoestring.batches(x, BATCH)
    losses: list[tuple[float, float]] = []
    began = time.monotonic()
    while optimizer.steps < STEPS:
        for chosen in loader:
            loss = nn.functional.cross_entropy(model(x[chosen]), y[chosen])
            torch.autograd.backward(loss)
            losses.append((time.monotonic() - began, loss.item()))
            optimizer.report(loss=losses[-1][1], samples=len(chosen), total=STEPS)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            if optimizer.steps == STEPS:
                break
    seconds = time.monotonic() - began
    model.train(False)
    with torch.no_grad():
        accuracy = (model(test_x).argmax(1) == test_y).float().mean().item()
    traffic = optimizer.traffic
    (folder / f"worker-{world.worker}.json").write_text(
        json.dumps(
            {
                "seconds": seconds,
                "bytes_sent": traffic.up + traffic.down,
                "accuracy": accuracy,
                "hash": optimizer.parameter_hash(),
                "loss": losses,
            }
        )
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
