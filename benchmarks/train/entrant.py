"""What a contestant of `python -m benchmarks.train` is to its trainer.

A contestant's module has one function, `enter(place, model, optimizer, options)`: it joins the
other hosts, with the model and the optimizer as a user would have made them, and gives back
something to train with. The trainer's loop is the same for all.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn


@dataclass(frozen=True)
class Place:
    """Where one trainer is: one worker a host."""

    host: int
    hosts: int
    addresses: tuple[str, ...]  # of every host, as all of them reach it
    card: str  # the network card towards the others
    port: int  # the first of 64 that are free on every host
    folder: Path  # which all hosts see, as they are one machine


class Entrant(Protocol):
    """A model and an optimizer that train together with the other hosts."""

    @property
    def model(self) -> nn.Module:
        """What to call forward on."""
        ...

    def step(self) -> None:
        """After backward: make the step, and whatever exchange is due."""
        ...

    def zero_grad(self) -> None: ...

    def facts(self) -> dict[str, Any]:
        """What was really used, for the result."""
        ...

    def close(self) -> None: ...


class Enter(Protocol):
    """Join the other hosts."""

    def __call__(
        self, place: Place, model: nn.Module, optimizer: torch.optim.Optimizer, options: dict[str, Any]
    ) -> Entrant: ...
