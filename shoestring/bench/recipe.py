"""What is trained for its gradients, and for how long.

A recipe and the data it meets name a capture: change either, and the gradients are
captured anew.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

# Called as `progress(what, done, total)`.
Progress = Callable[[str, int, int], None]

_VERSION = 1  # of the models in training.py


@dataclass(frozen=True)
class Recipe:
    """All that decides a training but for its data."""

    model: str  # `conv` or `gpt`
    width: int  # channels of the first layers, or of the transformer
    steps: int
    early: tuple[int, ...]  # steps to capture besides the last one, counted from 1
    batch: int
    learning_rate: float
    layers: int = 4
    heads: int = 6
    context: int = 128
    seed: int = 0

    @property
    def captures(self) -> tuple[int, ...]:
        return (*(step for step in self.early if step < self.steps), self.steps)

    def digest(self, *data: NDArray[np.uint8]) -> str:
        """Name the capture that this recipe gives on these data."""
        told = json.dumps([_VERSION, asdict(self)], sort_keys=True)
        digest = hashlib.sha256(told.encode())
        for array in data:
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()[:16]


FULL = {
    "conv": Recipe("conv", width=64, steps=300, early=(3, 30), batch=64, learning_rate=0.05),
    "gpt": Recipe("gpt", width=192, steps=300, early=(3, 60), batch=8, learning_rate=2e-3),
}
QUICK = {
    "conv": Recipe("conv", width=32, steps=80, early=(3, 30), batch=64, learning_rate=0.05),
    "gpt": Recipe("gpt", width=192, steps=100, early=(3, 60), batch=8, learning_rate=2e-3),
}
