"""What scripts do with gradients between `backward` and `step`."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn, optim

from benchmarks.compatibility.case import Found, World, case
from benchmarks.compatibility.cases.basics import mse, net


def _momentum(model: nn.Module) -> optim.Optimizer:
    return optim.SGD(model.parameters(), 0.05, momentum=0.9)


def _between(
    world: World, do: Callable[[nn.Module, int], Any], make: Callable[[nn.Module], Any] = _momentum
) -> Found:
    """The plain loop, with something done before each step."""
    model: nn.Module = net()
    model, optimizer = world.wrap(model, make(model))
    said = []
    for step, (x, y) in enumerate(world.batches()):
        loss = mse(model(x), y)
        world.note(loss)
        loss.backward()
        said.append(do(model, step))
        optimizer.step()
        optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer, "said": said}


def _gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


# Clipping and changing.


@case("clipping by norm")
def clip_norm(world: World) -> Found:
    return _between(world, lambda model, _: nn.utils.clip_grad_norm_(model.parameters(), 0.5))


@case("clipping by norm, Adam")
def clip_norm_adam(world: World) -> Found:
    return _between(
        world,
        lambda model, _: nn.utils.clip_grad_norm_(model.parameters(), 0.5, error_if_nonfinite=True),
        lambda model: optim.Adam(model.parameters(), 0.01),
    )


@case("clipping by the largest value's norm")
def clip_max_norm(world: World) -> Found:
    return _between(
        world, lambda model, _: nn.utils.clip_grad_norm_(model.parameters(), 0.05, norm_type=math.inf)
    )


@case("clipping by norm, two halves apart")
def clip_halves(world: World) -> Found:
    def clip(model: Any, _: int) -> list[Tensor]:
        layers = list(model.children())
        halves = (nn.ModuleList(layers[:2]), nn.ModuleList(layers[2:]))
        return [nn.utils.clip_grad_norm_(half.parameters(), 0.3) for half in halves]

    return _between(world, lambda model, step: clip(getattr(model, "module", model), step))


@case("clipping by value")
def clip_value(world: World) -> Found:
    return _between(world, lambda model, _: nn.utils.clip_grad_value_(model.parameters(), 0.02))


@case("clipping in two calls")
def clip_calls(world: World) -> Found:
    def clip(model: nn.Module, _: int) -> Tensor:
        norm = nn.utils.get_total_norm(_gradients(model))
        nn.utils.clip_grads_with_norm_(model.parameters(), 0.5, norm)
        return norm

    return _between(world, clip)


@case("norm logged, nothing clipped")
def log_norm(world: World) -> Found:
    return _between(world, lambda model, _: nn.utils.clip_grad_norm_(model.parameters(), math.inf))


@case("gradients multiplied by hand")
def multiply(world: World) -> Found:
    def halve(model: nn.Module, _: int) -> None:
        for gradient in _gradients(model):
            gradient.mul_(0.5)

    return _between(world, halve)


@case("gradients replaced by hand")
def replace(world: World) -> Found:
    def signs(model: nn.Module, _: int) -> None:
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad = parameter.grad.tanh()

    return _between(world, signs)


@case("noise added to gradients")
def noise(world: World) -> Found:
    source = torch.Generator().manual_seed(3)  # the same on all workers

    def add(model: nn.Module, _: int) -> None:
        for gradient in _gradients(model):
            gradient.add_(torch.randn(gradient.shape, generator=source), alpha=0.01)

    return _between(world, add)


@case("a gradient set to none by hand")
def set_none(world: World) -> Found:
    def forget(model: nn.Module, step: int) -> None:
        if step % 3 == 2:
            next(iter(model.parameters())).grad = None

    return _between(world, forget)


@case("gradients as a script sees them", modes=("wrap-model",))
def seen(world: World) -> Found:
    return _between(world, lambda model, _: [gradient.clone() for gradient in _gradients(model)])


# Zeroing.


def _zeroed(zero: Callable[[nn.Module, Any], None], is_first: bool, world: World) -> Found:
    model: nn.Module = net()
    model, optimizer = world.wrap(model, _momentum(model))
    for x, y in world.batches():
        if is_first:
            zero(model, optimizer)
        loss = mse(model(x), y)
        world.note(loss)
        loss.backward()
        optimizer.step()
        if not is_first:
            zero(model, optimizer)
    return {"model": model, "optimizer": optimizer}


def _by_hand(model: nn.Module, _: Any) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def _zero_in_place(model: nn.Module, _: Any) -> None:
    for gradient in _gradients(model):
        gradient.zero_()


_ZEROING: dict[str, Callable[[nn.Module, Any], None]] = {
    "`zero_grad(set_to_none=False)`": lambda model, own: own.zero_grad(set_to_none=False),
    "`model.zero_grad()`": lambda model, own: model.zero_grad(),
    "gradients set to none by hand": _by_hand,
    "gradients set to zero in place": _zero_in_place,
}
for _name, _zero in _ZEROING.items():
    case(_name)(partial(_zeroed, _zero, False))
case("`zero_grad` first in the loop")(partial(_zeroed, lambda model, own: own.zero_grad(), True))


@case("`zero_grad` between forward and backward")
def zero_between(world: World) -> Found:
    model: nn.Module = net()
    model, optimizer = world.wrap(model, _momentum(model))
    for x, y in world.batches():
        loss = mse(model(x), y)
        world.note(loss)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {"model": model, "optimizer": optimizer}


@case("gradients never zeroed")
def never_zeroed(world: World) -> Found:
    model: nn.Module = net()
    model, optimizer = world.wrap(model, optim.SGD(model.parameters(), 0.01))
    for x, y in world.batches():
        loss = mse(model(x), y)
        world.note(loss)
        loss.backward()
        optimizer.step()
    return {"model": model, "optimizer": optimizer}


# Several backward passes.


def _accumulated(world: World, count: int, total: int, *, is_synced: bool, clips: bool = False) -> Found:
    model: nn.Module = net()
    model, optimizer = world.wrap(model, _momentum(model))
    for step, (x, y) in enumerate(world.batches(total)):
        is_last = (step + 1) % count == 0 or step + 1 == total
        with nullcontext() if is_last or is_synced else model.no_sync():
            loss = mse(model(x), y)
            world.note(loss)
            (loss / count).backward()
        if is_last:
            if clips:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer}


@case("accumulation in `no_sync`")
def accumulated(world: World) -> Found:
    return _accumulated(world, 2, 40, is_synced=False)


@case("accumulation in `no_sync`, clipping")
def accumulated_clipped(world: World) -> Found:
    return _accumulated(world, 2, 40, is_synced=False, clips=True)


@case("accumulation in `no_sync`, an uneven end")
def accumulated_uneven(world: World) -> Found:
    return _accumulated(world, 3, 59, is_synced=False)


@case("accumulation without `no_sync`")
def accumulated_synced(world: World) -> Found:
    return _accumulated(world, 2, 40, is_synced=True)


@case("accumulation without `no_sync`, four passes, clipping")
def accumulated_synced_more(world: World) -> Found:
    return _accumulated(world, 4, 80, is_synced=True, clips=True)


@case("two losses, two backward passes, one step")
def two_losses(world: World) -> Found:
    model: nn.Module = net()
    model, optimizer = world.wrap(model, _momentum(model))
    for x, y in world.batches():
        loss = mse(model(x), y)
        world.note(loss)
        loss.backward()
        (0.1 * model(x + 0.1).abs().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer}


@case("a second loss in `no_sync`")
def second_loss(world: World) -> Found:
    model: Any = net()
    model, optimizer = world.wrap(model, _momentum(model))
    for x, y in world.batches():
        with model.no_sync():
            (0.1 * model(x).abs().mean()).backward()
        loss = mse(model(x), y)
        world.note(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer}


@case("two forward passes, one backward")
def two_forwards(world: World) -> Found:
    model: nn.Module = net()
    model, optimizer = world.wrap(model, _momentum(model))
    for x, y in world.batches():
        loss = (mse(model(x), y) + mse(model(x * 1.1), y)) / 2
        world.note(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer}


@case("a forward pass without backward before each step")
def idle_forward(world: World) -> Found:
    model: nn.Module = net()
    model, optimizer = world.wrap(model, _momentum(model))
    for x, y in world.batches():
        with torch.no_grad():
            wanted = y + 0.01 * model(x)  # as a teacher of itself
        loss = mse(model(x), wanted)
        world.note(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer}


# Gradients that are thrown away.


@case("a step left out after backward")
def left_out(world: World) -> Found:
    model: nn.Module = net()
    model, optimizer = world.wrap(model, _momentum(model))
    for step, (x, y) in enumerate(world.batches()):
        loss = mse(model(x), y)
        world.note(loss)
        loss.backward()
        if step % 5 != 4:
            optimizer.step()
        optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer}


@case("`continue` after backward, zeroing first in the loop")
def continue_after(world: World) -> Found:
    model: nn.Module = net()
    model, optimizer = world.wrap(model, _momentum(model))
    for step, (x, y) in enumerate(world.batches()):
        optimizer.zero_grad()
        loss = mse(model(x), y)
        world.note(loss)
        loss.backward()
        if step in (4, 5, 11):
            continue
        optimizer.step()
    return {"model": model, "optimizer": optimizer}


@case("adversarial inputs by a backward pass of its own")
def adversarial(world: World) -> Found:
    model: nn.Module = net()
    model, optimizer = world.wrap(model, _momentum(model))
    for x, y in world.batches():
        probe = x.clone().requires_grad_()
        mse(model(probe), y).backward()
        assert probe.grad is not None
        moved = x + 0.05 * probe.grad.tanh()
        optimizer.zero_grad()
        loss = mse(model(moved), y)
        world.note(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer}


@case("sharpness-aware minimisation")
def sharpness_aware(world: World) -> Found:
    model: nn.Module = net()
    model, optimizer = world.wrap(model, _momentum(model))
    for x, y in world.batches():
        loss = mse(model(x), y)
        world.note(loss)
        loss.backward()
        own = [p for p in model.parameters() if p.grad is not None]
        norm = nn.utils.get_total_norm(_gradients(model))
        with torch.no_grad():
            before = [p.clone() for p in own]
            for parameter in own:
                assert parameter.grad is not None
                parameter.add_(parameter.grad, alpha=float(0.05 / norm))
        optimizer.zero_grad()
        mse(model(x), y).backward()
        with torch.no_grad():
            for parameter, old in zip(own, before, strict=True):
                parameter.copy_(old)
        optimizer.step()
        optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer}


@case("gradient penalty")
def penalty(world: World) -> Found:
    model: nn.Module = net()
    model, optimizer = world.wrap(model, _momentum(model))
    for x, y in world.batches():
        x.requires_grad_()
        output = model(x)
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        loss = mse(output, y) + 0.1 * slope.square().mean()
        world.note(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer}


# NaN.


@case("NaN on one worker, the step left out by its norm", alone=True)
def nan_checked(world: World) -> Found:
    model: nn.Module = net()
    model, optimizer = world.wrap(model, _momentum(model))
    for step, (x, y) in enumerate(world.batches()):
        loss = mse(model(x), y)
        world.note(loss)
        (loss * (math.nan if step == 6 and world.rank == 1 else 1.0)).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        if norm.isfinite():
            optimizer.step()
        optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer}


_WHOLE = "a step with NaN is left out on all workers, where DDP's parameters become NaN"


@case(
    "NaN on one worker, unnoticed",
    modes=("wrap-model", "wrap-optimizer"),
    falls=False,
    ends_finite=False,
    trains={"wrap-optimizer": _WHOLE},
)
def nan_unnoticed(world: World) -> Found:
    model: nn.Module = net()
    model, optimizer = world.wrap(model, _momentum(model))
    for step, (x, y) in enumerate(world.batches()):
        loss = mse(model(x), y)
        world.note(loss)
        (loss * (math.nan if step == 16 and world.rank == 1 else 1.0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"model": model}


# Weights changed by hand.


def _after(world: World, do: Callable[[nn.Module, int], None], rate: float = 0.05) -> Found:
    model: nn.Module = net()
    model, optimizer = world.wrap(model, optim.SGD(model.parameters(), rate, momentum=0.9))
    for step, (x, y) in enumerate(world.batches()):
        loss = mse(model(x), y)
        world.note(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            do(model, step)
    return {"model": model, "optimizer": optimizer}


@case("weights clamped after each step")
def clamp(world: World) -> Found:
    def limit(model: nn.Module, _: int) -> None:
        for parameter in model.parameters():
            parameter.clamp_(-0.3, 0.3)

    return _after(world, limit)


@case("weights set anew halfway")
def reset(world: World) -> Found:
    def change(model: nn.Module, step: int) -> None:
        if step == 9:
            last = list(model.parameters())[-2]
            last.copy_(torch.full_like(last, 0.05))

    return _after(world, change)


@case("weights looked ahead by hand")
def lookahead(world: World) -> Found:
    slow: list[Tensor] = []

    def change(model: nn.Module, step: int) -> None:
        if not slow:
            slow.extend(parameter.clone() for parameter in model.parameters())
        elif step % 5 == 4:
            for parameter, old in zip(model.parameters(), slow, strict=True):
                old.lerp_(parameter, 0.5)
                parameter.copy_(old)

    return _after(world, change)


@case("weights swapped for their means to evaluate")
def swapped(world: World) -> Found:
    means: list[Tensor] = []
    scores: list[Tensor] = []
    x = torch.ones(2, 16)

    def change(model: nn.Module, step: int) -> None:
        own = list(model.parameters())
        if not means:
            means.extend(parameter.clone() for parameter in own)
        for parameter, mean in zip(own, means, strict=True):
            mean.lerp_(parameter, 0.2)
        kept = [parameter.clone() for parameter in own]
        for parameter, mean in zip(own, means, strict=True):
            parameter.copy_(mean)
        scores.append(model(x).mean())
        for parameter, old in zip(own, kept, strict=True):
            parameter.copy_(old)

    return {**_after(world, change), "scores": scores}


@case("weights swapped through `.data`")
def swapped_data(world: World) -> Found:
    def change(model: nn.Module, step: int) -> None:
        if step == 9:
            for parameter in model.parameters():
                parameter.data = parameter.data * 0.9

    return _after(world, change)
