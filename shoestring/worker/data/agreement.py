"""Random draws on which all workers agree, whatever their own generators are at.

Samplers and streams draw from the generators of Python, NumPy and torch, or from one that they
were given. Workers have seeded these as they like, and have drawn from them at will. While draws
are agreed, the three are in states that follow from a seed alone, and a generator of torch's that
a sampler or dataset holds as `generator` is replaced by such a one. Afterwards all are as before,
and the next agreed draws go on where these ended.
"""

import random
from types import TracebackType
from typing import Any

import numpy as np
import torch


class AgreedRandom:
    """A context in which draws are the same on all workers that give the same entropy."""

    def __init__(self, entropy: tuple[int, ...], *owners: object) -> None:
        """Seed it by numbers; `owners` may hold generators of their own."""
        words = [int(word) for word in np.random.SeedSequence(entropy).generate_state(4)]
        generators = (random.Random(words[0]), np.random.RandomState(words[1]), _generator(words[2]))
        self._states: tuple[Any, Any, torch.Tensor] = (
            generators[0].getstate(),
            generators[1].get_state(),
            generators[2].get_state(),
        )
        self._own = _generator(words[3])
        self._owners = [
            owner for owner in owners if isinstance(_attributes(owner).get("generator"), torch.Generator)
        ]
        self._theirs: list[torch.Generator] = []

    def __enter__(self) -> None:
        self._swap()
        self._theirs = [_attributes(owner)["generator"] for owner in self._owners]
        for owner in self._owners:
            _attributes(owner)["generator"] = self._own

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for owner, generator in zip(self._owners, self._theirs, strict=True):
            _attributes(owner)["generator"] = generator
        self._swap()

    def _swap(self) -> None:
        """Exchange the states of the process's generators for those that are kept here."""
        current = (random.getstate(), np.random.get_state(), torch.get_rng_state())
        random.setstate(self._states[0])
        np.random.set_state(self._states[1])
        torch.set_rng_state(self._states[2])
        self._states = current


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _attributes(owner: object) -> dict[str, Any]:
    return getattr(owner, "__dict__", {})
