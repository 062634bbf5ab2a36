"""Batches that differ between workers in number, and what a script does between steps."""

from typing import Any

import torch
from torch import Tensor, nn, optim
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from benchmarks.compatibility.case import Found, World, case
from benchmarks.compatibility.cases.basics import mse, net


def _sgd(model: nn.Module) -> optim.Optimizer:
    return optim.SGD(model.parameters(), 0.05, momentum=0.9)


def _step(world: World, model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = mse(model(x), y)
    world.note(loss)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


@case("evaluation on one worker only")
def evaluated(world: World) -> Found:
    model: Any = net()
    model, optimizer = world.wrap(model, _sgd(model))
    scores = []
    for step, (x, y) in enumerate(world.batches()):
        _step(world, model, optimizer, x, y)
        if step % 5 == 4 and world.rank == 0:
            model.eval()
            with torch.no_grad():
                scores.append(mse(model(x), y))
            model.train()
    return {"model": model, "optimizer": optimizer, "scores": scores}


@case("evaluation on one worker only, BatchNorm and dropout")
def evaluated_norm(world: World) -> Found:
    layers = (nn.Linear(16, 64), nn.BatchNorm1d(64), nn.Dropout(0.1), nn.Tanh(), nn.Linear(64, 4))
    model: Any = nn.Sequential(*layers)
    model, optimizer = world.wrap(model, _sgd(model))
    scores = []
    for step, (x, y) in enumerate(world.batches()):
        _step(world, model, optimizer, x, y)
        if step % 5 == 4 and world.rank == 0:
            model.module.eval()
            with torch.inference_mode():
                scores.append(mse(model.module(x), y).item())
            model.module.train()
    return {"model": model, "optimizer": optimizer, "scores": scores}


@case("one worker passes over a batch")
def passed_over(world: World) -> Found:
    """It takes its next one instead: both take as many steps."""
    model: Any = net()
    model, optimizer = world.wrap(model, _sgd(model))
    for number, (x, y) in enumerate(world.batches(21)):
        if number == (7 if world.rank == 1 else 20):
            continue
        _step(world, model, optimizer, x, y)
    return {"model": model, "optimizer": optimizer}


@case("one worker's batch counts nothing")
def counts_nothing(world: World) -> Found:
    model: Any = net()
    model, optimizer = world.wrap(model, _sgd(model))
    for step, (x, y) in enumerate(world.batches()):
        loss = mse(model(x), y)
        world.note(loss)
        (loss * (0.0 if step % 4 == 3 and world.rank == 1 else 1.0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer}


@case("unequal batches")
def unequal(world: World) -> Found:
    model: Any = net()
    model, optimizer = world.wrap(model, _sgd(model))
    for x, y in world.batches():
        count = 16 if world.rank == 0 else 5
        _step(world, model, optimizer, x[:count], y[:count])
    return {"model": model, "optimizer": optimizer}


@case("one worker has fewer batches", alone=True)
def uneven(world: World) -> Found:
    """The other goes on by itself; the first one's parameters are what a script would save."""
    model: Any = net()
    model, optimizer = world.wrap(model, optim.SGD(model.parameters(), 0.1))
    together: list[Tensor] = []
    with world.uneven(model):
        for step, (x, y) in enumerate(world.batches(20 if world.rank == 0 else 16)):
            _step(world, model, optimizer, x, y)
            if step == 15:
                together = [parameter.detach().clone() for parameter in model.parameters()]
    return {"shared.together": together, "first.weights": list(model.parameters())}


@case("both workers stop early")
def stop_early(world: World) -> Found:
    model: Any = net()
    model, optimizer = world.wrap(model, _sgd(model))
    for step, (x, y) in enumerate(world.batches(40)):
        _step(world, model, optimizer, x, y)
        if step == 19:
            break
    return {"model": model, "optimizer": optimizer}


@case("two trainings, one after the other")
def twice(world: World) -> Found:
    found: dict[str, Any] = {}
    for name in ("first", "second"):
        model: Any = net()
        wrapped, optimizer = world.wrap(model, optim.Adam(model.parameters(), 0.01))
        for x, y in world.batches():
            _step(world, wrapped, optimizer, x, y)
        found |= {name: wrapped, f"of_{name}": optimizer}
    return found


@case("the same model wrapped anew with a fresh optimizer")
def wrapped_anew(world: World) -> Found:
    plain = net()
    model: Any = plain
    model, optimizer = world.wrap(plain, optim.Adam(plain.parameters(), 0.01))
    for step, (x, y) in enumerate(world.batches()):
        if step == 10:
            model, optimizer = world.wrap(plain, _sgd(plain))
        _step(world, model, optimizer, x, y)
    return {"model": model, "optimizer": optimizer}


def _join(world: World) -> bool:
    """As a script for DDP begins; says whether it has to end what it began."""
    if dist.is_initialized():
        return False
    dist.init_process_group(
        "gloo", init_method=f"file://{world.folder}/group", rank=world.rank, world_size=world.workers
    )
    return True


@case("process group and DistributedSampler left in place")
def left_in_place(world: World) -> Found:
    joined = _join(world)
    source = torch.Generator().manual_seed(4)
    x = torch.randn(320, 16, generator=source)
    data = TensorDataset(x, (x[:, :4] + x[:, 4:8]).tanh())
    sampler: Any = DistributedSampler(data, seed=3)
    loader = DataLoader(data, 16, sampler=sampler)
    model: Any = net()
    model, optimizer = world.wrap(model, optim.Adam(model.parameters(), 0.02))
    means = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, wanted in loader:
            loss = _step(world, model, optimizer, inputs, wanted).detach()
            dist.all_reduce(loss)
            means.append(loss / world.workers)
    dist.barrier()
    if joined:
        dist.destroy_process_group()
    return {"model": model, "optimizer": optimizer, "means": means}


@case("a DDP model given to `wrap`")
def given_ddp(world: World) -> Found:
    joined = _join(world)
    plain: Any = net()
    model: Any = DistributedDataParallel(plain)
    optimizer: Any = optim.SGD(model.parameters(), 0.05, momentum=0.9)
    before = plain[0].weight.detach().clone()
    wrapped, optimizer = world.wrap(model, optimizer)
    if world.is_ddp:  # `world` notes how far parameters go when it wraps
        world.model(plain)
    for x, y in world.batches():
        _step(world, wrapped, optimizer, x, y)
    assert not torch.equal(before, plain[0].weight)
    if joined:
        dist.destroy_process_group()
    return {"model": plain, "optimizer": optimizer}


@case("a DDP model that goes on beside the wrapped one's name")
def ddp_beside(world: World) -> Found:
    """The script keeps calling the DDP object it made, whose inner module was wrapped."""
    joined = _join(world)
    plain = net()
    model: Any = DistributedDataParallel(plain)
    _, optimizer = world.wrap(plain if not world.is_ddp else model, _sgd(plain))
    if world.is_ddp:
        world.model(plain)
    for x, y in world.batches():
        _step(world, model, optimizer, x, y)
    if joined:
        dist.destroy_process_group()
    return {"model": plain, "optimizer": optimizer}
