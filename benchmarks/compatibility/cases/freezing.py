"""Parameters that are not trained, or not all the time."""

from typing import Any

import torch
from torch import Tensor, nn, optim

from benchmarks.compatibility.case import Found, World, case
from benchmarks.compatibility.cases.basics import mse, net, train


def _loop(world: World, model: nn.Module, optimizer: Any, change: Any, *, unused: bool = False) -> Found:
    """The plain loop; `change` may freeze and unfreeze, and says whether it did."""
    for step, (x, y) in enumerate(world.batches()):
        if change(step):
            model = world.again(model, unused=unused)
        loss = mse(model(x), y)
        world.note(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer}


@case("frozen from the start")
def frozen(world: World) -> Found:
    model = net()
    model[0].requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    return train(world, model, optim.SGD(trained, 0.2))


@case("frozen parameters in the optimizer")
def frozen_inside(world: World) -> Found:
    model = net()
    model[0].requires_grad_(False)
    return train(world, model, optim.Adam(model.parameters(), 0.01))


@case("frozen parameters that differ between workers")
def frozen_apart(world: World) -> Found:
    model = net()
    model[0].requires_grad_(False)
    if world.rank == 1:
        model[0].weight.fill_(0.5)
    trained = [p for p in model.parameters() if p.requires_grad]
    return train(world, model, optim.SGD(trained, 0.2))


@case("unfrozen halfway")
def unfrozen(world: World) -> Found:
    plain = net()
    plain[0].requires_grad_(False)
    model, optimizer = world.wrap(plain, optim.SGD(plain.parameters(), 0.05, momentum=0.9))

    def change(step: int) -> bool:
        if step == 8:
            plain[0].requires_grad_(True)
        return step == 8

    return _loop(world, model, optimizer, change)


@case("unfrozen halfway, Adam")
def unfrozen_adam(world: World) -> Found:
    plain = net()
    plain[0].requires_grad_(False)
    model, optimizer = world.wrap(plain, optim.Adam(plain.parameters(), 0.01))

    def change(step: int) -> bool:
        if step == 8:
            plain[0].requires_grad_(True)
        return step == 8

    return _loop(world, model, optimizer, change)


@case("unfrozen halfway into a new group")
def unfrozen_group(world: World) -> Found:
    plain = net()
    plain[0].requires_grad_(False)
    model, optimizer = world.wrap(plain, optim.Adam(plain[2:].parameters(), 0.01))

    def change(step: int) -> bool:
        if step == 8:
            plain[0].requires_grad_(True)
            optimizer.add_param_group({"params": list(plain[0].parameters()), "lr": 0.002})
        return step == 8

    return _loop(world, model, optimizer, change)


@case("unfrozen layer by layer")
def unfrozen_gradually(world: World) -> Found:
    plain = net()
    plain.requires_grad_(False)
    plain[4].requires_grad_(True)
    model, optimizer = world.wrap(plain, optim.SGD(plain.parameters(), 0.1, momentum=0.5))

    def change(step: int) -> bool:
        if step in (6, 12):
            plain[2 if step == 6 else 0].requires_grad_(True)
        return step in (6, 12)

    return _loop(world, model, optimizer, change)


@case("frozen halfway")
def frozen_halfway(world: World) -> Found:
    plain = net()
    model, optimizer = world.wrap(plain, optim.SGD(plain.parameters(), 0.05, momentum=0.9), unused=True)

    def change(step: int) -> bool:
        if step == 10:
            plain[0].requires_grad_(False)
        return False

    return _loop(world, model, optimizer, change)


@case("frozen and unfrozen in turns")
def in_turns(world: World) -> Found:
    plain = net()
    model, optimizer = world.wrap(plain, optim.Adam(plain.parameters(), 0.01), unused=True)

    def change(step: int) -> bool:
        plain[0].requires_grad_(step // 5 % 2 == 0)
        return False

    return _loop(world, model, optimizer, change, unused=True)


class Adapted(nn.Module):
    """A frozen layer and a low-rank one beside it."""

    def __init__(self, base: nn.Module, inputs: int, outputs: int, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, inputs) / inputs**0.5)
        self.up = nn.Parameter(torch.zeros(outputs, rank))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.base(x) + x @ self.down.T @ self.up.T
        return output


def _adapted() -> nn.Sequential:
    plain = net()
    return nn.Sequential(
        Adapted(plain[0], 16, 32), nn.Tanh(), Adapted(plain[2], 32, 32), nn.Tanh(), Adapted(plain[4], 32, 4)
    )


@case("adapters on a frozen base")
def adapters(world: World) -> Found:
    model = _adapted()
    return train(world, model, optim.AdamW([p for p in model.parameters() if p.requires_grad], 0.03))


class Quantised(nn.Module):
    """A layer of int8, with a scale a row."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        scale = layer.weight.detach().abs().amax(1, keepdim=True) / 127
        codes = (layer.weight.detach() / scale).round().to(torch.int8)
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.register_buffer("scale", scale)
        self.register_buffer("bias", layer.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        scale, bias = self.get_buffer("scale"), self.get_buffer("bias")
        return x @ (self.codes.float() * scale).T + bias


@case("adapters on a quantised base")
def quantised(world: World) -> Found:
    plain: Any = net()
    model = nn.Sequential(
        Adapted(Quantised(plain[0]), 16, 32),
        nn.Tanh(),
        Adapted(Quantised(plain[2]), 32, 32),
        nn.Tanh(),
        Adapted(Quantised(plain[4]), 32, 4),
    )
    return train(world, model, optim.AdamW([p for p in model.parameters() if p.requires_grad], 0.03))


@case("adapters added halfway")
def adapters_halfway(world: World) -> Found:
    """The base is trained, then frozen, and adapters with another optimizer go on."""
    model: Any = net()
    wrapped, optimizer = world.wrap(model, optim.SGD(model.parameters(), 0.1))
    for step, (x, y) in enumerate(world.batches()):
        if step == 10:
            torch.manual_seed(7)
            model = nn.Sequential(Adapted(model, 16, 4), nn.Identity())
            trained = [p for p in model.parameters() if p.requires_grad]
            wrapped, optimizer = world.wrap(model, optim.AdamW(trained, 0.03))
        loss = mse(wrapped(x), y)
        world.note(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"model": wrapped, "optimizer": optimizer}
