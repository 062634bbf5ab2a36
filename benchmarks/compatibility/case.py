"""A case: a short training script that is written once and runs under DDP and under Shoestring.

A case is a function of a `World`, which stands for the lines in which the two differ. It notes the
losses of its own batches and returns what the training made: models, optimizers, values.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

STEPS = 20
MODES = ("wrap-model", "wrap-optimizer", "local")

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
Batch = tuple[Tensor, Tensor]
Found = Mapping[str, Any]  # nn.Module, Optimizer, Tensor or number, by name


class World(Protocol):
    """What differs between DDP and Shoestring, for the script of a case."""

    rank: int
    workers: int
    is_ddp: bool
    has_shards: bool  # whether `wrap` hands the optimizer over
    folder: Path  # that both workers see, empty when the case begins

    def model(self, model: nn.Module, *, unused: bool = False) -> nn.Module:
        """`DistributedDataParallel(model)` or `shoestring.wrap(model)`."""

    def wrap(self, model: nn.Module, optimizer: Optimizers, *, unused: bool = False) -> tuple[nn.Module, Any]:
        """As `model`, or `shoestring.wrap(model, optimizer)` where the mode says so."""

    def again(self, model: nn.Module, *, unused: bool = False) -> nn.Module:
        """Wrap anew under DDP, which does not see parameters that are new or were frozen."""

    def batches(self, steps: int = STEPS) -> Iterator[Batch]:
        """This worker's batches: inputs [16, 16] and what a fixed net makes of them, [16, 4]."""

    def note(self, loss: Tensor) -> None:
        """Remember the loss of a step."""

    def uneven(self, model: nn.Module) -> AbstractContextManager[Any]:
        """`Join([model])` under DDP, which needs it where workers have unequally many batches."""

    def meet(self) -> None:
        """Wait until both workers are here."""


@dataclass(frozen=True)
class Case:
    """A script, and what can be expected of it."""

    name: str
    group: str  # the file it is in
    script: Callable[[World], Found]
    modes: tuple[str, ...] = MODES
    falls: bool = True  # whether its losses must have fallen in the end
    ends_finite: bool = True  # whether its parameters must be numbers in the end
    widest: float = 1e-3  # of a tolerance of parameters, as a part of the way that they went
    alone: bool = False  # in processes of its own
    limit_s: float = 45.0
    trains: Mapping[str, str] = field(default_factory=dict)  # modes without DDP's result, and why


CASES: dict[str, Case] = {}


def case(name: str, **more: Any) -> Callable[[Callable[[World], Found]], Callable[[World], Found]]:
    """Put a script among the cases."""

    def add(script: Callable[[World], Found]) -> Callable[[World], Found]:
        if name in CASES:
            raise ValueError(f"two cases are called `{name}`")
        home = getattr(script, "func", script).__module__  # of a `partial` too
        CASES[name] = Case(name, home.rpartition(".")[2], script, **more)
        return script

    return add
