"""Copies of a model: means of weights, pickles, compiled ones."""

import copy
import io
import pickle
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn

from benchmarks.compatibility.case import Found, World, case
from benchmarks.compatibility.cases.basics import mse, net, train

_COMPILED_S = 240.0


def _sgd(model: nn.Module) -> optim.Optimizer:
    return optim.SGD(model.parameters(), 0.05, momentum=0.9)


def _loop(world: World, model: nn.Module, optimizer: Any, after: Any) -> Found:
    for step, (x, y) in enumerate(world.batches()):
        loss = mse(model(x), y)
        world.note(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        after(step)
    return {"model": model, "optimizer": optimizer}


def _follow(mean: nn.Module, model: nn.Module) -> None:
    with torch.no_grad():
        for own, other in zip(mean.parameters(), model.parameters(), strict=True):
            own.lerp_(other, 0.2)


@case("mean of weights by deepcopy before `wrap`")
def mean_before(world: World) -> Found:
    model: nn.Module = net()
    mean = copy.deepcopy(model)
    model, optimizer = world.wrap(model, _sgd(model))
    return {**_loop(world, model, optimizer, lambda step: _follow(mean, model)), "mean": mean}


@case("mean of weights by deepcopy after `wrap`")
def mean_after(world: World) -> Found:
    model: nn.Module = net()
    model, optimizer = world.wrap(model, _sgd(model))
    mean: Any = copy.deepcopy(model.module)
    mean.requires_grad_(False)
    return {**_loop(world, model, optimizer, lambda step: _follow(mean, model)), "mean": mean}


@case("mean of weights by deepcopy halfway")
def mean_halfway(world: World) -> Found:
    model: nn.Module = net()
    model, optimizer = world.wrap(model, _sgd(model))
    kept: dict[str, Any] = {}

    def after(step: int) -> None:
        if step == 7:
            kept["mean"] = copy.deepcopy(model.module)
        elif step > 7:
            _follow(kept["mean"], model)

    found = _loop(world, model, optimizer, after)
    return {**found, **kept}


@case("AveragedModel, exponential")
def averaged(world: World) -> Found:
    model: Any = net()
    model, optimizer = world.wrap(model, _sgd(model))
    mean = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    return {**_loop(world, model, optimizer, lambda step: mean.update_parameters(model.module)), "mean": mean}


@case("stochastic weight averaging with BatchNorm")
def swa(world: World) -> Found:
    layers = (nn.Linear(16, 32, bias=False), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 4))
    model: Any = nn.Sequential(*layers)
    model, optimizer = world.wrap(model, _sgd(model))
    mean = AveragedModel(model.module)
    scheduler = SWALR(optimizer, swa_lr=0.02, anneal_epochs=5)

    def after(step: int) -> None:
        scheduler.step()
        if step >= 10:
            mean.update_parameters(model.module)

    found = _loop(world, model, optimizer, after)
    update_bn([torch.randn(8, 16, generator=torch.Generator().manual_seed(1))], mean)
    return {**found, "mean": mean}


@case("a copy that one worker trains by itself")
def copy_trained(world: World) -> Found:
    model: Any = net()
    model, optimizer = world.wrap(model, _sgd(model))
    seen = []

    def after(step: int) -> None:
        if step == 9 and world.rank == 0:
            probe: Any = copy.deepcopy(model.module)
            own = optim.SGD(probe.parameters(), 0.1)
            for _ in range(3):
                loss = probe(torch.ones(2, 16)).square().mean()
                loss.backward()
                own.step()
                own.zero_grad()
                seen.append(loss.item())

    return {**_loop(world, model, optimizer, after), "seen": seen}


@case("pickle of the model")
def pickled(world: World) -> Found:
    model: Any = net()
    model, optimizer = world.wrap(model, _sgd(model))
    found = _loop(world, model, optimizer, lambda step: None)
    twin = pickle.loads(pickle.dumps(model.module))
    assert type(twin) is nn.Sequential
    return {**found, "twin": twin, "first.output": twin(torch.ones(2, 16))}


@case("torch.save of the model and of the optimizer as they are")
def saved_whole(world: World) -> Found:
    model: Any = net()
    model, optimizer = world.wrap(model, _sgd(model))
    kept: dict[str, Any] = {}

    def after(step: int) -> None:
        if step == 9 and world.rank == 0:
            memory = io.BytesIO()
            torch.save({"model": model.module, "optimizer": optimizer.state_dict()}, memory)
            memory.seek(0)
            twin = torch.load(memory, weights_only=False)["model"]
            kept["first.output"] = twin(torch.ones(2, 16))

    found = _loop(world, model, optimizer, after)
    return {**found, **kept}


@case("best weights kept and brought back")
def best_kept(world: World) -> Found:
    model: Any = net()
    model, optimizer = world.wrap(model, _sgd(model))
    kept: dict[str, Any] = {}

    def after(step: int) -> None:
        if step == 6:
            kept["best"] = copy.deepcopy(model.module.state_dict())
        elif step == 12:
            model.module.load_state_dict(kept["best"])

    return _loop(world, model, optimizer, after)


@case("weights loaded with `assign=True` halfway", modes=("wrap-model",))
def assigned(world: World) -> Found:
    model: Any = net()
    model, optimizer = world.wrap(model, optim.SGD(model.parameters(), 0.1))
    for step, (x, y) in enumerate(world.batches()):
        if step == 10:
            state = {name: value * 0.9 for name, value in model.module.state_dict().items()}
            model.module.load_state_dict(state, assign=True)
            model = world.again(model)
            optimizer = optim.SGD(model.parameters(), 0.1)
        loss = mse(model(x), y)
        world.note(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"model": model}


# Compiled.


@case("compiled before `wrap`", limit_s=_COMPILED_S)
def compiled_before(world: World) -> Found:
    model: Any = torch.compile(net(), backend="aot_eager")
    return train(world, model, _sgd(model))


@case("compiled after `wrap`", limit_s=_COMPILED_S)
def compiled_after(world: World) -> Found:
    model: Any = net()
    model, optimizer = world.wrap(model, _sgd(model))
    compiled: Any = torch.compile(model, backend="aot_eager")
    return _loop(world, compiled, optimizer, lambda step: None)


@case("compiled after `wrap`, BatchNorm, Adam", limit_s=_COMPILED_S)
def compiled_after_norm(world: World) -> Found:
    model: Any = nn.Sequential(nn.Linear(16, 32, bias=False), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 4))
    model, optimizer = world.wrap(model, optim.Adam(model.parameters(), 0.01))
    compiled: Any = torch.compile(model, backend="aot_eager")
    return _loop(world, compiled, optimizer, lambda step: None)


@case("compiled in place before `wrap`", limit_s=_COMPILED_S)
def compiled_in_place(world: World) -> Found:
    model: Any = net()
    model.compile(backend="aot_eager")
    return train(world, model, _sgd(model))


@case("compiled after `wrap`, accumulation in `no_sync`", limit_s=_COMPILED_S)
def compiled_accumulated(world: World) -> Found:
    model: Any = net()
    model, optimizer = world.wrap(model, _sgd(model))
    compiled: Any = torch.compile(model, backend="aot_eager")
    for step, (x, y) in enumerate(world.batches(40)):
        if step % 2 == 0:
            with model.no_sync():
                (mse(compiled(x), y) / 2).backward()
            continue
        loss = mse(compiled(x), y) / 2
        world.note(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer}


@case("the compiled function of a training step's loss", limit_s=_COMPILED_S)
def compiled_loss(world: World) -> Found:
    model: Any = net()
    model, optimizer = world.wrap(model, _sgd(model))
    criterion = torch.compile(mse, backend="aot_eager")
    for x, y in world.batches():
        loss: Tensor = criterion(model(x), y)
        world.note(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer}
