"""Shoestring as a contestant: the three lines of the README, under torchrun's environment."""

import os
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from benchmarks.train.entrant import Place
from shoestring.launch.start import init, wrap
from shoestring.worker import session
from shoestring.worker.optimizer import SharedOptimizer
from shoestring.worker.rounds.policy import text_of

KEYS = "keys"  # the folder of keys, inside the place's own


class OwnEntrant:
    """A worker of a run with a shard on every host."""

    def __init__(self, model: nn.Module, optimizer: SharedOptimizer, options: dict[str, Any]) -> None:
        self.model = model
        self._optimizer = optimizer
        self._options = options
        self._codecs: list[str] = []

    def step(self) -> None:
        driver = self._optimizer.driver
        rounds = driver.rounds
        self._optimizer.step()
        if driver.rounds > rounds and driver.pilot.codec not in self._codecs:
            self._codecs.append(driver.pilot.codec)

    def zero_grad(self) -> None:
        self._optimizer.zero_grad()

    def agreed(self) -> AbstractContextManager[None]:
        """What all workers agreed on last, to be scored."""
        return self._optimizer.agreed()

    def facts(self) -> dict[str, Any]:
        return {
            **self._options,
            "codecs_used": self._codecs,
            "policy_used": text_of(self._optimizer.driver.policy),
        }

    def close(self) -> None:
        session.end()


def enter(
    place: Place, model: nn.Module, optimizer: torch.optim.Optimizer, options: dict[str, Any]
) -> OwnEntrant:
    """Join the run; `options` are the codec and the policy."""
    is_one = len(set(place.addresses)) == 1
    os.environ |= {
        "RANK": str(place.host),
        "WORLD_SIZE": str(place.hosts),
        "LOCAL_RANK": str(place.host if is_one else 0),
        "LOCAL_WORLD_SIZE": str(place.hosts if is_one else 1),
        "GROUP_RANK": str(0 if is_one else place.host),
        "GROUP_WORLD_SIZE": str(1 if is_one else place.hosts),
        "MASTER_ADDR": place.addresses[0],
        "MASTER_PORT": str(place.port),
        "SHOESTRING_KEYS": str(place.folder / KEYS),
    }
    init()
    wrapped, shared = wrap(model, optimizer, codec=options["codec"], policy=options["policy"])
    return OwnEntrant(wrapped, shared, options)
