"""What `python -m benchmarks.batchnorm` trains on: three cases, and which images a step takes.

Every way of normalising meets the same images: they are drawn from the seed and the step
alone, for all workers at once, and a worker takes its own row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shoestring.bench.data import Images, load_images
from shoestring.errors import UsageError


@dataclass(frozen=True)
class Case:
    """How many images a worker takes in a step, and whether all of them are of one class."""

    name: str
    batch: int
    is_one_class: bool = False


CASES = {case.name: case for case in (Case("few-classes", 2, True), Case("batch-1", 1), Case("plain", 2))}


def find_cases(names: Sequence[str]) -> list[Case]:
    """The cases of these names; of none, all."""
    for name in names:
        if name not in CASES:
            raise UsageError(f"there is no case `{name}`", hint=f"one of {', '.join(CASES)}")
    return [CASES[name] for name in names or CASES]


def load_parts(folder: Path | None) -> tuple[Images, Images]:
    """The images to train on and those to test with; of the digits every fifth is for the test."""
    images = load_images(folder)
    if images.source != "digits":
        return images, load_images(folder, "t10k")
    is_test = np.arange(len(images.labels)) % 5 == 0
    train, test = (
        Images(images.source, images.pixels[one], images.labels[one]) for one in (~is_test, is_test)
    )
    return train, test


class Draws:
    """The images of every step of a training."""

    def __init__(self, case: Case, labels: NDArray[np.uint8], *, workers: int, seed: int) -> None:
        self._case, self._workers, self._seed = case, workers, seed
        self._total = len(labels)
        found = [np.flatnonzero(labels == label) for label in np.unique(labels)]
        self._classes = found if case.is_one_class else []
        if case.is_one_class and workers > len(found):
            raise UsageError(
                f"{workers} workers cannot have a class each of {len(found)}", hint="take fewer workers"
            )

    def step(self, step: int) -> NDArray[np.int64]:
        """Indices [workers, batch]; with one class a worker, no two workers have the same."""
        source = np.random.default_rng([self._seed, step])
        size = (self._workers, self._case.batch)
        if not self._case.is_one_class:
            return source.integers(0, self._total, size)
        classes = source.permutation(len(self._classes))[: self._workers]
        return np.stack([source.choice(self._classes[one], self._case.batch) for one in classes])
