"""The worlds that a case runs in: DDP over gloo, and Shoestring's two forms of `wrap`.

Both make the same batches, note the same things, and keep what parameters were when they were
wrapped, to know how far they went.
"""

import gc
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable
from torch.nn.parallel import DistributedDataParallel

import shoestring
from benchmarks.compatibility.case import STEPS, Batch, Optimizers
from benchmarks.compatibility.outcome import AGREED, OWN, SHARED

WORKERS = 2
BATCH, INPUTS, OUTPUTS = 16, 16, 4
_LOOK_S = 0.01
_MEET_S = 40.0
_COLUMNS = 8  # of the hidden layer of the net that makes targets


class _World:
    """What both worlds have in common."""

    is_ddp = False
    has_shards = False

    def __init__(self, rank: int, folder: Path) -> None:
        self.rank = rank
        self.workers = WORKERS
        self.folder = folder
        self.losses: list[float] = []
        self._before: list[tuple[Tensor, Tensor]] = []
        self._moved = 0.0
        self._meetings = 0

    def batches(self, steps: int = STEPS) -> Iterator[Batch]:
        fixed = torch.Generator().manual_seed(1)
        inner = torch.randn(INPUTS, _COLUMNS, generator=fixed) / INPUTS**0.5
        outer = torch.randn(_COLUMNS, OUTPUTS, generator=fixed)
        for step in range(steps):
            source = torch.Generator().manual_seed(1000 * self.rank + step + 2)
            x = torch.randn(BATCH, INPUTS, generator=source)
            yield x, torch.tanh(x @ inner) @ outer

    def note(self, loss: Tensor) -> None:
        self.losses.append(float(loss.detach()))
        self._measure()

    def meet(self) -> None:
        self._meetings += 1
        (self.folder / f"met-{self._meetings}-{self.rank}").touch()
        others = [self.folder / f"met-{self._meetings}-{rank}" for rank in range(self.workers)]
        if not await_files(others, _MEET_S):
            raise TimeoutError(f"the other worker did not come within {_MEET_S:g} s")

    def moved(self) -> float:
        """The furthest that one value of a parameter went from where it was wrapped."""
        self._measure()
        return self._moved

    def settle(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """Tell what of the values that a script has returned both workers must hold with the same bits."""
        return values

    def _measure(self) -> None:
        for parameter, before in self._before:
            if parameter.numel():
                way = (parameter.detach().double() - before.double()).abs().max().item()
                self._moved = max(self._moved, way)

    def _remember(self, model: nn.Module) -> None:
        self._before += [
            (parameter, parameter.detach().clone())
            for parameter in model.parameters()
            if parameter.is_floating_point()
        ]


class DdpWorld(_World):
    """`DistributedDataParallel`, in processes that have a process group."""

    is_ddp = True

    def model(self, model: nn.Module, *, unused: bool = False) -> nn.Module:
        if isinstance(model, DistributedDataParallel):
            return model
        wrapped = DistributedDataParallel(model, find_unused_parameters=unused)
        self._remember(model)
        return wrapped

    def wrap(self, model: nn.Module, optimizer: Optimizers, *, unused: bool = False) -> tuple[nn.Module, Any]:
        return self.model(model, unused=unused), optimizer

    def again(self, model: nn.Module, *, unused: bool = False) -> nn.Module:
        inner = bare(model)
        gc.collect()
        return DistributedDataParallel(inner, find_unused_parameters=unused)

    def uneven(self, model: nn.Module) -> AbstractContextManager[Any]:
        assert isinstance(model, Joinable)
        return Join([model], divide_by_initial_world_size=False)


class WrapModelWorld(_World):
    """`shoestring.wrap(model)`: the mean gradient, and the script's own optimizer."""

    def model(self, model: nn.Module, *, unused: bool = False) -> nn.Module:
        wrap: Any = shoestring.wrap
        wrapped: nn.Module = wrap(model)
        self._remember(bare(wrapped))
        return wrapped

    def wrap(self, model: nn.Module, optimizer: Optimizers, *, unused: bool = False) -> tuple[nn.Module, Any]:
        return self.model(model), optimizer

    def again(self, model: nn.Module, *, unused: bool = False) -> nn.Module:
        return model

    def uneven(self, model: nn.Module) -> AbstractContextManager[Any]:
        return nullcontext()


class WrapOptimizerWorld(WrapModelWorld):
    """`shoestring.wrap(model, optimizer)`: the update on the shards, or local steps."""

    has_shards = True

    def wrap(self, model: nn.Module, optimizer: Optimizers, *, unused: bool = False) -> tuple[nn.Module, Any]:
        wrap: Any = shoestring.wrap
        wrapped, shared = wrap(model, optimizer)
        self._remember(bare(wrapped))
        return wrapped, shared


class LocalWorld(WrapOptimizerWorld):
    """Local steps: between two rounds parameters are each worker's own, and scripts may end there.

    So what workers must agree on is what they agreed on in the last round, if it was the same one: the
    other goes on by itself when one has ended.
    """

    def __init__(self, rank: int, folder: Path) -> None:
        super().__init__(rank, folder)
        self._optimizers: list[Any] = []

    def wrap(self, model: nn.Module, optimizer: Optimizers, *, unused: bool = False) -> tuple[nn.Module, Any]:
        wrapped, shared = super().wrap(model, optimizer)
        self._optimizers.append(shared)
        return wrapped, shared

    def settle(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        settled = {name.replace(f"{SHARED}.", f"{OWN}.", 1): value for name, value in values.items()}
        for number, optimizer in enumerate(self._optimizers):
            driver = optimizer.driver
            for part, anchor in enumerate(driver.anchors.values):
                settled[f"{AGREED}.{driver.rounds}.{number}.{part}"] = anchor.clone()
        return settled


def bare(model: nn.Module) -> nn.Module:
    """The module that a script wrapped or compiled."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif type(model).__name__ == "OptimizedModule":  # its module is slow to import
            model = model.get_submodule("_orig_mod")
        else:
            return model


def await_files(paths: list[Path], limit_s: float) -> bool:
    """Wait until all files are there; say whether they are."""
    end = time.monotonic() + limit_s
    while not all(path.exists() for path in paths):
        if time.monotonic() > end:
            return False
        time.sleep(_LOOK_S)
    return True
