"""What most scripts share: a small net, and the plain loop."""

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.compatibility.case import World


def net() -> nn.Sequential:
    """A net of 1,700 values, smooth so that rounding stays small."""
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))


def mse(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target)


def train(world: World, model: nn.Module, optimizer: torch.optim.Optimizer, **more: Any) -> dict[str, Any]:
    """Wrap both, and train."""
    wrapped, own = world.wrap(model, optimizer, **more)
    for x, y in world.batches():
        loss = mse(wrapped(x), y)
        world.note(loss)
        loss.backward()
        own.step()
        own.zero_grad()
    return {"model": wrapped, "optimizer": own}
