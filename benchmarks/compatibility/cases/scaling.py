"""`GradScaler` and autocast."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn, optim

from benchmarks.compatibility.case import Found, World, case
from benchmarks.compatibility.cases.basics import mse, net

_SCALE, _GROWTH = 2.0**12, 6  # first scale, and after how many steps it doubles


def _scaled(
    world: World,
    *,
    unscale: Callable[[nn.Module], Any] | None = None,
    overflows: Callable[[int], bool] = lambda step: False,
    is_adam: bool = False,
    is_cast: bool = False,
    **more: Any,
) -> Found:
    """The recipe of torch's documentation."""
    model: nn.Module = net()
    optimizer: Any = (
        optim.Adam(model.parameters(), 0.01) if is_adam else optim.SGD(model.parameters(), 0.05, momentum=0.9)
    )
    model, optimizer = world.wrap(model, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=_SCALE, growth_interval=_GROWTH, **more)
    scales, said = [], []
    for step, (x, y) in enumerate(world.batches()):
        with torch.autocast("cpu", torch.bfloat16) if is_cast else nullcontext():
            loss = mse(model(x), y)
        world.note(loss)
        scaled = scaler.scale(loss)
        if overflows(step):
            scaled = scaled * math.inf
        scaled.backward()
        if unscale is not None:
            scaler.unscale_(optimizer)
            said.append(unscale(model))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return {"model": model, "optimizer": optimizer, "scales": scales, "said": said}


def _clip(model: nn.Module) -> Tensor:
    return nn.utils.clip_grad_norm_(model.parameters(), 0.5)


@case("GradScaler")
def plain(world: World) -> Found:
    return _scaled(world)


@case("GradScaler, Adam")
def adam(world: World) -> Found:
    return _scaled(world, is_adam=True)


@case("GradScaler, switched off")
def switched_off(world: World) -> Found:
    return _scaled(world, enabled=False)


@case("GradScaler, `unscale_`")
def unscaled(world: World) -> Found:
    return _scaled(world, unscale=lambda model: None)


@case("GradScaler, `unscale_`, clipping")
def clipped(world: World) -> Found:
    return _scaled(world, unscale=_clip)


@case("GradScaler, overflow on one worker")
def overflow(world: World) -> Found:
    return _scaled(world, overflows=lambda step: step == 7 and world.rank == 1)


@case("GradScaler, overflow on both workers")
def overflow_both(world: World) -> Found:
    return _scaled(world, is_adam=True, overflows=lambda step: step == 7)


@case("GradScaler, overflow in the first step")
def overflow_first(world: World) -> Found:
    return _scaled(world, is_adam=True, overflows=lambda step: step == 0 and world.rank == 0)


@case("GradScaler, `unscale_`, clipping, overflow on one worker")
def overflow_clipped(world: World) -> Found:
    return _scaled(world, unscale=_clip, overflows=lambda step: step in (3, 9) and world.rank == step % 2)


# Rounding to bf16 within the net makes jumps of what would be a rounding of float32.
@case("autocast to bf16", widest=0.02)
def autocast(world: World) -> Found:
    return _scaled(world, is_cast=True, enabled=False)


@case("autocast to bf16, GradScaler", widest=0.02)
def autocast_scaled(world: World) -> Found:
    return _scaled(world, is_cast=True)


@case("GradScaler, accumulation")
def accumulated(world: World) -> Found:
    model: nn.Module = net()
    model, optimizer = world.wrap(model, optim.SGD(model.parameters(), 0.05, momentum=0.9))
    scaler = torch.amp.GradScaler("cpu", init_scale=_SCALE, growth_interval=_GROWTH)
    for step, (x, y) in enumerate(world.batches(40)):
        is_last = step % 2 == 1
        with nullcontext() if is_last else model.no_sync():
            loss = mse(model(x), y) / 2
            world.note(loss)
            scaler.scale(loss).backward()
        if is_last:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer}


@case("GradScaler, overflow in the first of two passes without `no_sync`")
def overflow_accumulated(world: World) -> Found:
    model: Any = net()
    model, optimizer = world.wrap(model, optim.SGD(model.parameters(), 0.05, momentum=0.9))
    scaler = torch.amp.GradScaler("cpu", init_scale=_SCALE, growth_interval=_GROWTH)
    for step, (x, y) in enumerate(world.batches(40)):
        loss = mse(model(x), y) / 2
        world.note(loss)
        scaled = scaler.scale(loss)
        (scaled * math.inf if step == 12 and world.rank == 1 else scaled).backward()
        if step % 2 == 1:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer, "scale": scaler.get_scale()}


@case("GradScaler, two optimizers")
def two_optimizers(world: World) -> Found:
    model = net()
    both = [optim.SGD(model[:2].parameters(), 0.1), optim.Adam(model[2:].parameters(), 0.01)]
    wrapped, (first, second) = world.wrap(model, both)
    scaler = torch.amp.GradScaler("cpu", init_scale=_SCALE, growth_interval=_GROWTH)
    for step, (x, y) in enumerate(world.batches()):
        loss = mse(wrapped(x), y)
        world.note(loss)
        scaled = scaler.scale(loss)
        (scaled * math.inf if step == 5 and world.rank == 0 else scaled).backward()
        for optimizer in (first, second):
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()
    return {"model": wrapped, "first": first, "second": second, "scale": scaler.get_scale()}
