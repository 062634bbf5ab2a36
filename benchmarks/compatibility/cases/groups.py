"""Parameter groups and what scripts do with an optimizer besides its steps."""

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn, optim

from benchmarks.compatibility.case import Found, World, case
from benchmarks.compatibility.cases.basics import mse, net, train


@case("groups with rates of their own")
def rates(world: World) -> Found:
    model = net()
    groups: list[dict[str, Any]] = [
        {"params": model[:2].parameters(), "lr": 0.002},
        {"params": model[2:].parameters()},
    ]
    return train(world, model, optim.Adam(groups, lr=0.02))


@case("groups with decay of their own")
def decays(world: World) -> Found:
    model = net()
    groups = [
        {"params": [p for p in model.parameters() if p.ndim == 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim != 2], "weight_decay": 0.0},
    ]
    return train(world, model, optim.AdamW(groups, lr=0.01))


@case("groups, one with momentum")
def momenta(world: World) -> Found:
    model = net()
    groups: list[dict[str, Any]] = [
        {"params": model[:2].parameters(), "momentum": 0.9},
        {"params": model[2:].parameters()},
    ]
    return train(world, model, optim.SGD(groups, lr=0.05))


@case("groups, one that maximizes")
def maximizing(world: World) -> Found:
    """One part of the loss is turned round for one part of the net: a game that ends as descent."""
    model = net()
    groups: list[dict[str, Any]] = [
        {"params": model[:4].parameters()},
        {"params": model[4:].parameters(), "maximize": True},
    ]
    for parameter in model[4].parameters():
        parameter.register_hook(lambda gradient: -gradient)
    return train(world, model, optim.SGD(groups, lr=0.1))


def _steps(world: World, model: nn.Module, optimizer: Any, change: Any) -> Found:
    """The plain loop, with something done before each step's forward."""
    for step, (x, y) in enumerate(world.batches()):
        change(step)
        loss = mse(model(x), y)
        world.note(loss)
        loss.backward()
        optimizer.step()
        model.zero_grad()
    return {"model": model, "optimizer": optimizer}


@case("a group that comes halfway")
def group_added(world: World) -> Found:
    plain = net()
    model, optimizer = world.wrap(plain, optim.Adam(plain[4].parameters(), 0.02))

    def change(step: int) -> None:
        if step == 8:
            optimizer.add_param_group({"params": list(plain[:4].parameters()), "lr": 0.01})

    return _steps(world, model, optimizer, change)


@case("rate changed by hand")
def rate_by_hand(world: World) -> Found:
    model: nn.Module = net()
    model, optimizer = world.wrap(model, optim.SGD(model.parameters(), 0.05, momentum=0.9))

    def change(step: int) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.02 + 0.005 * step

    return _steps(world, model, optimizer, change)


@case("betas, eps and decay changed by hand")
def betas_by_hand(world: World) -> Found:
    model: nn.Module = net()
    model, optimizer = world.wrap(model, optim.AdamW(model.parameters(), 0.01))

    def change(step: int) -> None:
        if step == 5:
            for group in optimizer.param_groups:
                group["betas"] = (0.7, 0.9)
                group["eps"] = 1e-4
                group["weight_decay"] = 0.2

    return _steps(world, model, optimizer, change)


@case("momentum switched on by hand")
def momentum_by_hand(world: World) -> Found:
    model: nn.Module = net()
    model, optimizer = world.wrap(model, optim.SGD(model.parameters(), 0.05))

    def change(step: int) -> None:
        if step == 5:
            optimizer.param_groups[0]["momentum"] = 0.9
            optimizer.param_groups[0]["nesterov"] = True

    return _steps(world, model, optimizer, change)


@case("a group replaced by a new dict")
def group_replaced(world: World) -> Found:
    model: nn.Module = net()
    model, optimizer = world.wrap(model, optim.SGD(model.parameters(), 0.01, momentum=0.9))

    def change(step: int) -> None:
        if step == 5:
            optimizer.param_groups[0] = {**optimizer.param_groups[0], "lr": 0.05}

    return _steps(world, model, optimizer, change)


@case("moments forgotten halfway")
def moments_forgotten(world: World) -> Found:
    model: nn.Module = net()
    model, optimizer = world.wrap(model, optim.Adam(model.parameters(), 0.01))

    def change(step: int) -> None:
        if step == 10:
            optimizer.state = defaultdict(dict)

    return _steps(world, model, optimizer, change)


@case("moments read at every step")
def moments_read(world: World) -> Found:
    model: nn.Module = net()
    model, optimizer = world.wrap(model, optim.Adam(model.parameters(), 0.01))
    seen = []

    def change(step: int) -> None:
        if step > 0:
            first = next(iter(optimizer.param_groups[0]["params"]))
            seen.append(optimizer.state[first]["exp_avg"].clone())

    return {**_steps(world, model, optimizer, change), "seen": seen}


@case("parameters in another order")
def another_order(world: World) -> Found:
    model = net()
    return train(world, model, optim.Adam(list(model.parameters())[::-1], 0.01))


@case("parameters with their names")
def with_names(world: World) -> Found:
    model = net()
    return train(world, model, optim.Adam(model.named_parameters(), 0.01))


@case("only some parameters in the optimizer")
def only_some(world: World) -> Found:
    plain = net()
    model, optimizer = world.wrap(plain, optim.SGD(plain[2:].parameters(), 0.2))
    return _steps(world, model, optimizer, lambda step: None)


@case("a loss with parameters of its own")
def loss_with_parameters(world: World) -> Found:
    """The uncertainty of each output is learned beside the net."""

    class Uncertain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.zeros(4))

        def forward(self, output: Tensor, wanted: Tensor) -> Tensor:
            return (((output - wanted) ** 2) * torch.exp(-self.scale) + self.scale).mean()

    both = nn.ModuleDict({"net": net(), "loss": Uncertain()})
    optimizer: Any = optim.SGD(both.parameters(), 0.05)
    if world.is_ddp:
        model, criterion = world.model(both["net"]), world.model(both["loss"])
    else:
        wrapped, optimizer = world.wrap(both, optimizer)
        model, criterion = both["net"], both["loss"]
        assert wrapped is both
    for x, y in world.batches():
        loss = criterion(model(x), y)
        world.note(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"model": both, "optimizer": optimizer}


@case("the optimizer also has another model's parameters")
def of_two_models(world: World) -> Found:
    first, second = nn.Sequential(nn.Linear(16, 32), nn.Tanh()), nn.Linear(32, 4)
    optimizer: Any = optim.SGD([*first.parameters(), *second.parameters()], 0.2)
    front = first if world.has_shards else world.model(first)
    back, optimizer = world.wrap(second, optimizer)
    for x, y in world.batches():
        loss = mse(back(front(x)), y)
        world.note(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"first": first, "second": second}


@case("hooks before and after steps")
def step_hooks(world: World) -> Found:
    model: nn.Module = net()
    model, optimizer = world.wrap(model, optim.SGD(model.parameters(), 0.2))
    called: list[float] = []
    optimizer.register_step_pre_hook(lambda *_: called.append(1.0))
    optimizer.register_step_post_hook(lambda *_: called.append(2.0))
    found = _steps(world, model, optimizer, lambda step: None)
    return {**found, "called": called}


@case("a hook before steps that changes gradients")
def changing_hook(world: World) -> Found:
    def centre(own: optim.Optimizer, *_: Any) -> None:
        for parameter in own.param_groups[0]["params"]:
            if parameter.ndim == 2:
                parameter.grad -= parameter.grad.mean(1, keepdim=True)

    model: nn.Module = net()
    optimizer = optim.SGD(model.parameters(), 0.2)
    optimizer.register_step_pre_hook(centre)
    return train(world, model, optimizer)


@case("optimizer made from the wrapped model", modes=("wrap-model",))
def made_later(world: World) -> Found:
    model = world.model(net())
    return _steps(world, model, optim.Adam(model.parameters(), 0.01), lambda step: None)


@case("a second optimizer halfway", modes=("wrap-model",))
def second_halfway(world: World) -> Found:
    model = world.model(net())
    optimizer: optim.Optimizer = optim.Adam(model.parameters(), 0.01)
    for step, (x, y) in enumerate(world.batches()):
        if step == 10:
            optimizer = optim.SGD(model.parameters(), 0.05, momentum=0.9)
        loss = mse(model(x), y)
        world.note(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer}
