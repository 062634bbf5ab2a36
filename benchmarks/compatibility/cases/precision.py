"""Parameters that are not float32."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn, optim

from benchmarks.compatibility.case import Found, World, case
from benchmarks.compatibility.cases.basics import mse, net

_MASTERS = "the shards hold float32 masters, which DDP does not"


def _of_type(
    world: World, dtype: torch.dtype, make: Callable[[Any], optim.Optimizer], *, after: bool = False
) -> Found:
    model: nn.Module = net()
    if not after:
        model = model.to(dtype)
    model, optimizer = world.wrap(model, make(model.parameters()))
    if after:
        model.to(dtype)
        model = world.again(model)
    for x, y in world.batches():
        loss = mse(model(x.to(dtype)).float(), y)
        world.note(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer}


@case("bf16 parameters, SGD", trains={"wrap-optimizer": _MASTERS})
def bf16_sgd(world: World) -> Found:
    return _of_type(world, torch.bfloat16, lambda own: optim.SGD(own, 0.05, momentum=0.9))


@case("bf16 parameters, AdamW", trains={"wrap-optimizer": _MASTERS})
def bf16_adamw(world: World) -> Found:
    return _of_type(world, torch.bfloat16, lambda own: optim.AdamW(own, 0.01))


@case("half parameters, SGD", trains={"wrap-optimizer": _MASTERS})
def half_sgd(world: World) -> Found:
    return _of_type(world, torch.float16, lambda own: optim.SGD(own, 0.05, momentum=0.9))


@case("float64 parameters, SGD")
def double_sgd(world: World) -> Found:
    return _of_type(world, torch.float64, lambda own: optim.SGD(own, 0.05, momentum=0.9))


@case("float64 parameters, Adam")
def double_adam(world: World) -> Found:
    return _of_type(world, torch.float64, lambda own: optim.Adam(own, 0.01))


@case("`model.double()` after `wrap`")
def double_after(world: World) -> Found:
    return _of_type(world, torch.float64, lambda own: optim.SGD(own, 0.2), after=True)


@case("`model.bfloat16()` after `wrap`", trains={"wrap-optimizer": _MASTERS})
def bf16_after(world: World) -> Found:
    return _of_type(world, torch.bfloat16, lambda own: optim.SGD(own, 0.2), after=True)


@case('`model.to("cpu")` after `wrap`')
def moved_after(world: World) -> Found:
    return _of_type(world, torch.float32, lambda own: optim.Adam(own, 0.01), after=True)


class Mixed(nn.Module):
    """Layers of float32 around one of bf16."""

    def __init__(self) -> None:
        super().__init__()
        plain = net()
        self.first, self.last = plain[0], plain[4]
        self.middle = plain[2].to(torch.bfloat16)
        self.norm = nn.LayerNorm(32)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        x = self.middle(x.to(torch.bfloat16)).float()
        output: Tensor = self.last(self.norm(x).tanh())
        return output


@case("bf16 and float32 parameters in one model", trains={"wrap-optimizer": _MASTERS})
def mixed(world: World) -> Found:
    model: nn.Module = Mixed()
    model, optimizer = world.wrap(model, optim.AdamW(model.parameters(), 0.01))
    for x, y in world.batches():
        loss = mse(model(x), y)
        world.note(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer}


# A float32 value that rounds to the other bf16 changes what follows by 2^-8 of that value.
@case("bf16 parameters, float32 masters on the shards", modes=("wrap-optimizer",), widest=0.06)
def masters(world: World) -> Found:
    """Beside DDP with the masters by hand: float32 sums of bf16 gradients, AdamW on float32."""
    model: nn.Module = net()
    masters = [nn.Parameter(parameter.detach().clone()) for parameter in model.parameters()]
    model = model.bfloat16()
    if world.is_ddp:
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters(), strict=True):
                master.copy_(parameter)  # what bf16 has lost is lost
        own: Any = optim.AdamW(masters, 0.01)
    else:
        model, own = world.wrap(model, optim.AdamW(model.parameters(), 0.01))
    if world.is_ddp:
        world.model(model)  # for its first broadcast, and to know how far parameters go
    for x, y in world.batches():
        loss = mse(model(x.bfloat16()).float(), y)
        world.note(loss)
        loss.backward()
        if world.is_ddp:
            for master, parameter in zip(masters, model.parameters(), strict=True):
                assert parameter.grad is not None
                total = parameter.grad.float()
                torch.distributed.all_reduce(total)
                master.grad = total / world.workers
        own.step()
        model.zero_grad()
        if world.is_ddp:
            with torch.no_grad():
                for master, parameter in zip(masters, model.parameters(), strict=True):
                    parameter.copy_(master)
    return {"model": model}


class Spectral(nn.Module):
    """Complex factors on the frequencies of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = nn.Parameter(torch.randn(9, dtype=torch.complex64))
        self.last = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(x) * self.factors
        output: Tensor = self.last(torch.fft.irfft(spectrum, 16))
        return output


@case("complex parameters")
def complex_parameters(world: World) -> Found:
    model: nn.Module = Spectral()
    model, optimizer = world.wrap(model, optim.SGD(model.parameters(), 0.1))
    for x, y in world.batches():
        loss = mse(model(x), y)
        world.note(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer}
