"""Every optimizer of `torch.optim`, and some of a user's own."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn, optim

from benchmarks.compatibility.case import Found, World, case
from benchmarks.compatibility.cases.basics import mse, net, train

Parameters = Iterable[nn.Parameter]


def _plain(make: Callable[[Parameters], optim.Optimizer], world: World) -> Found:
    model = net()
    return train(world, model, make(model.parameters()))


class Lion(optim.Optimizer):
    """As its paper has it."""

    def __init__(self, params: Parameters, lr: float, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            first, second = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                mean = state["exp_avg"]
                parameter.add_((first * mean + (1 - first) * parameter.grad).sign_(), alpha=-group["lr"])
                mean.mul_(second).add_(parameter.grad, alpha=1 - second)


class ScheduleFree(optim.Optimizer):
    """Gradients are taken at a mix of a fast and an average iterate; evaluation is at the average."""

    def __init__(self, params: Parameters, lr: float, mix: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "mix": mix, "k": 0, "is_training": True})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["k"] += 1
            for parameter in group["params"]:
                fast = self.state[parameter].setdefault("fast", parameter.clone())
                mean = self.state[parameter].setdefault("mean", parameter.clone())
                fast.sub_(parameter.grad, alpha=group["lr"])
                mean.lerp_(fast, 1 / group["k"])
                parameter.copy_(fast.lerp(mean, group["mix"]))

    @torch.no_grad()
    def evaluate(self, is_on: bool) -> None:
        """Put the averages in the parameters' place, and back."""
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                parameter.copy_(state["mean"] if is_on else state["fast"].lerp(state["mean"], group["mix"]))


class DecayedSGD(optim.SGD):
    """A step of torch's, and something before it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(0.99)
        return super().step(closure)


OPTIMIZERS: dict[str, Callable[[Parameters], optim.Optimizer]] = {
    "SGD": partial(optim.SGD, lr=0.2),
    "SGD, weight decay": partial(optim.SGD, lr=0.2, weight_decay=0.01),
    "SGD, momentum": partial(optim.SGD, lr=0.05, momentum=0.9),
    "SGD, momentum, dampening": partial(optim.SGD, lr=0.2, momentum=0.8, dampening=0.3, weight_decay=0.01),
    "SGD, Nesterov": partial(optim.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "SGD, foreach": partial(optim.SGD, lr=0.05, momentum=0.9, foreach=True),
    "SGD, fused": partial(optim.SGD, lr=0.05, momentum=0.9, fused=True),
    "Adam": partial(optim.Adam, lr=0.01),
    "Adam, weight decay": partial(optim.Adam, lr=0.01, weight_decay=0.01),
    "Adam, amsgrad": partial(optim.Adam, lr=0.01, amsgrad=True),
    "Adam, decoupled decay": partial(optim.Adam, lr=0.01, weight_decay=0.1, decoupled_weight_decay=True),
    "Adam, fused": partial(optim.Adam, lr=0.01, fused=True),
    "Adam, rate as a tensor": lambda own: optim.Adam(own, lr=torch.tensor(0.01)),
    "AdamW": partial(optim.AdamW, lr=0.01),
    "AdamW, amsgrad": partial(optim.AdamW, lr=0.01, amsgrad=True, weight_decay=0.1, betas=(0.8, 0.95)),
    "NAdam": partial(optim.NAdam, lr=0.01),
    "RAdam": partial(optim.RAdam, lr=0.05),
    "Adamax": partial(optim.Adamax, lr=0.02),
    "Adagrad": partial(optim.Adagrad, lr=0.05),
    "Adadelta": partial(optim.Adadelta, lr=5.0),
    "RMSprop": partial(optim.RMSprop, lr=0.003),
    "RMSprop, centered, momentum": partial(optim.RMSprop, lr=0.002, centered=True, momentum=0.5),
    "Rprop": partial(optim.Rprop, lr=0.003),
    "ASGD": partial(optim.ASGD, lr=0.2, t0=5),
    "Adafactor": partial(optim.Adafactor, lr=0.05),
    "Lion, a user's": partial(Lion, lr=0.005),
    "a user's subclass of SGD": partial(DecayedSGD, lr=0.05, momentum=0.9),
}

for _name, _make in OPTIMIZERS.items():
    case(_name)(partial(_plain, _make))


@case("SGD, maximize")
def maximize(world: World) -> Found:
    model = net()
    model, optimizer = world.wrap(model, optim.SGD(model.parameters(), 0.05, momentum=0.9, maximize=True))
    for x, y in world.batches():
        gain = -mse(model(x), y)
        world.note(-gain)
        gain.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer}


@case("LBFGS")
def lbfgs(world: World) -> Found:
    model = net()
    # No end by the change of the loss, which is each worker's own.
    optimizer = optim.LBFGS(model.parameters(), lr=0.2, max_iter=2, history_size=4, tolerance_change=0)
    model, optimizer = world.wrap(model, optimizer)
    for x, y in world.batches():

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = mse(model(x), y)
            loss.backward()
            return loss

        world.note(optimizer.step(closure))
    return {"model": model}


def _words(world: World) -> Any:
    """Batches of words, and what a table of vectors should give for them."""
    table = torch.randn(40, 8, generator=torch.Generator().manual_seed(5))
    for step in range(20):
        source = torch.Generator().manual_seed(1000 * world.rank + step)
        words = torch.randint(0, 40, (16, 6), generator=source)
        yield words, table[words].mean(1)


class Sparse(nn.Module):
    """An embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 8, sparse=True)

    def forward(self, words: Tensor) -> Tensor:
        mean: Tensor = self.table(words).mean(1)
        return mean


def _sparse(make: Callable[[Parameters], optim.Optimizer], world: World) -> Found:
    model: nn.Module = Sparse()
    model, optimizer = world.wrap(model, make(model.parameters()))
    for words, wanted in _words(world):
        loss = mse(model(words), wanted)
        world.note(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"model": model}


case("SparseAdam, sparse gradients")(partial(_sparse, partial(optim.SparseAdam, lr=0.05)))
case("SGD, sparse gradients")(partial(_sparse, partial(optim.SGD, lr=20.0)))


# Muon works in bf16: what is a rounding of float32 may become one of bf16.
@case("Muon beside AdamW", widest=0.02)
def muon(world: World) -> Found:
    model = net()
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    both = [optim.Muon(matrices, lr=0.02), optim.AdamW(others, lr=0.01)]
    wrapped, (first, second) = world.wrap(model, both)
    for x, y in world.batches():
        loss = mse(wrapped(x), y)
        world.note(loss)
        loss.backward()
        first.step()
        second.step()
        first.zero_grad()
        second.zero_grad()
    return {"model": wrapped, "first": first, "second": second}


@case("two optimizers, one model")
def two_optimizers(world: World) -> Found:
    model = net()
    both = [
        optim.SGD(model[:4].parameters(), 0.05, momentum=0.9),
        optim.Adam(model[4].parameters(), 0.01),
    ]
    wrapped, (body, head) = world.wrap(model, both)
    for step, (x, y) in enumerate(world.batches()):
        loss = mse(wrapped(x), y)
        world.note(loss)
        loss.backward()
        head.step()
        if step % 2:  # every second time, on the sum of two steps' gradients
            body.step()
            body.zero_grad()
        head.zero_grad()
    return {"model": wrapped, "body": body, "head": head}


@case("schedule-free SGD, a user's, evaluated in between")
def schedule_free(world: World) -> Found:
    model: Any = net()
    own = ScheduleFree(model.parameters(), 0.3)
    model, optimizer = world.wrap(model, own)
    scores = []
    for step, (x, y) in enumerate(world.batches()):
        loss = mse(model(x), y)
        world.note(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 4:
            own.evaluate(True)
            with torch.no_grad():
                scores.append(model(torch.ones(2, 16)))
            own.evaluate(False)
    return {"model": model, "optimizer": optimizer, "scores": scores}


@case("two steps for one backward pass")
def two_steps(world: World) -> Found:
    model: Any = net()
    model, optimizer = world.wrap(model, optim.Adam(model.parameters(), 0.005))
    for x, y in world.batches():
        loss = mse(model(x), y)
        world.note(loss)
        loss.backward()
        optimizer.step()
        optimizer.step()
        optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer}


@case("a step before any gradient")
def step_first(world: World) -> Found:
    model: Any = net()
    model, optimizer = world.wrap(model, optim.Adam(model.parameters(), 0.01))
    optimizer.step()  # as some scripts do to silence a warning of the scheduler
    for x, y in world.batches():
        loss = mse(model(x), y)
        world.note(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer}


@case("no optimizer, an update by hand", modes=("wrap-model",))
def by_hand(world: World) -> Found:
    model = world.model(net())
    for x, y in world.batches():
        loss = mse(model(x), y)
        world.note(loss)
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.sub_(parameter.grad, alpha=0.2)
                parameter.grad = None
    return {"model": model}


@case("step(closure)")
def closure_step(world: World) -> Found:
    model = net()
    model, optimizer = world.wrap(model, optim.SGD(model.parameters(), 0.05, momentum=0.9))
    for x, y in world.batches():

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = mse(model(x), y)
            loss.backward()
            return loss

        world.note(optimizer.step(closure))
    return {"model": model, "optimizer": optimizer}
