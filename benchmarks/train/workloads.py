"""What the contestants train: a residual net on images, and a transformer on Python source.

All contestants see the same initial parameters, the same global batch of every step, cut among
the hosts, and the same shape of learning-rate schedule; only its height is their own.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.batchnorm.net import Block, to_input
from shoestring.bench.codec.training import Transformer
from shoestring.bench.data import load_images, load_text
from shoestring.errors import UsageError

_TEST_IMAGES = 5000
_CONTEXT = 64
_HELD_OUT = 300_000  # bytes at the end of the text
_TEST_PIECES = 512
_CHUNK = 250


class Images:
    """Fashion-MNIST, and a residual net of three stages with BatchNorm."""

    def __init__(self, seed: int, folder: Path | None) -> None:
        train, test = load_images(folder), load_images(folder, "t10k")
        self.source = train.source
        self._pixels, self._labels = to_input(train.pixels), torch.from_numpy(train.labels.astype(np.int64))
        self._test = to_input(test.pixels[:_TEST_IMAGES])
        self._test_labels = torch.from_numpy(test.labels[:_TEST_IMAGES].astype(np.int64))
        self._seed = seed

    def build(self) -> nn.Module:
        torch.manual_seed(self._seed)
        first, second, third = 48, 96, 192
        return nn.Sequential(
            nn.Conv2d(1, first, 3, 2, 1, bias=False),
            nn.BatchNorm2d(first),
            nn.ReLU(),
            Block(first, first, 2, nn.BatchNorm2d, 1),
            Block(first, second, 1, nn.BatchNorm2d, 1),
            Block(second, third, 2, nn.BatchNorm2d, 1),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(third, 10),
        )

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=5e-4)

    def loss(self, model: nn.Module, chosen: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(self._pixels[chosen]), self._labels[chosen])

    @property
    def count(self) -> int:
        return len(self._labels)

    @torch.no_grad()
    def score(self, model: nn.Module) -> float:
        """Accuracy on the test images, in percent."""
        pairs = zip(torch.split(self._test, _CHUNK), torch.split(self._test_labels, _CHUNK), strict=True)
        right = sum(int((model(x).argmax(1) == y).sum()) for x, y in pairs)
        return 100 * right / len(self._test_labels)


class Text:
    """The Python standard library's source, and a byte-level transformer."""

    def __init__(self, seed: int, folder: Path | None) -> None:
        text = torch.from_numpy(load_text().astype(np.int64))
        self.source = "python"
        self._train, held_out = text[:-_HELD_OUT], text[-_HELD_OUT:]
        places = torch.linspace(0, len(held_out) - _CONTEXT - 1, _TEST_PIECES).long()
        self._window = torch.arange(_CONTEXT + 1)
        self._test = held_out[places[:, None] + self._window]
        self._seed = seed

    def build(self) -> nn.Module:
        torch.manual_seed(self._seed)
        return Transformer(128, 4, 4, _CONTEXT)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), 1e-3, betas=(0.9, 0.95), weight_decay=0.01)

    def loss(self, model: nn.Module, chosen: Tensor) -> Tensor:
        return _likelihood(model, self._train[chosen[:, None] + self._window])

    @property
    def count(self) -> int:
        return len(self._train) - _CONTEXT

    @torch.no_grad()
    def score(self, model: nn.Module) -> float:
        """Loss on text that was held out, in nats a byte."""
        losses = [float(_likelihood(model, pieces)) * len(pieces) for pieces in torch.split(self._test, 64)]
        return sum(losses) / len(self._test)


def _likelihood(model: nn.Module, pieces: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(pieces[:, :-1]).flatten(0, 1), pieces[:, 1:].flatten())


Material = Images | Text


@dataclass(frozen=True)
class Workload:
    """A training, and when it has come far enough."""

    name: str
    material: Callable[[int, Path | None], Material]
    steps: int
    batch: int  # of all hosts together
    warmup: int  # first steps, in which the learning rate rises
    score_every: int
    rates: tuple[float, ...]  # learning rates to choose from
    target: float
    better: Literal["higher", "lower"]

    def is_reached(self, score: float) -> bool:
        return score >= self.target if self.better == "higher" else score <= self.target

    def rate(self, step: int, highest: float) -> float:
        """The learning rate of a step, counted from 0: up, then down along a cosine."""
        rise = min(1.0, (step + 1) / self.warmup)
        return highest * rise * 0.5 * (1 + math.cos(math.pi * step / self.steps))

    def batches(self, seed: int, count: int) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
        """Which samples make up each step: [steps, batch], every sample once before any twice."""
        source = np.random.default_rng(seed)
        wanted = self.steps * self.batch
        rounds = -(-wanted // count)
        order = np.concatenate([source.permutation(count) for _ in range(rounds)])
        return order[:wanted].reshape(self.steps, self.batch)


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("conv", Images, 800, 32, 40, 40, (0.00625, 0.0125, 0.025, 0.05), 85.0, "higher"),
        Workload("gpt", Text, 1000, 8, 50, 40, (1e-3, 2e-3, 4e-3), 2.15, "lower"),
    )
}


def find_workload(name: str) -> Workload:
    try:
        return WORKLOADS[name]
    except KeyError:
        raise UsageError(f"there is no workload `{name}`", hint=f"one of {', '.join(WORKLOADS)}") from None
