"""State that goes to a file and comes back: from a wrapped run into plain torch, and the other way."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn, optim

from benchmarks.compatibility.case import Found, World, case
from benchmarks.compatibility.cases.basics import mse, net

Make = Callable[[Any], Any]
_HALF = 10

_MAKERS: dict[str, Make] = {
    "SGD": lambda own: optim.SGD(own, 0.05, momentum=0.9),
    "Adam": lambda own: optim.Adam(own, 0.01),
    "AdamW, amsgrad": lambda own: optim.AdamW(own, 0.01, amsgrad=True),
    "RMSprop": lambda own: optim.RMSprop(own, 0.003, momentum=0.3),
}


def _steps(world: World, model: nn.Module, optimizer: Any, first: int, last: int) -> None:
    for step, (x, y) in enumerate(world.batches(last)):
        if step < first:
            continue
        loss = mse(model(x), y)
        world.note(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def _load(path: Any) -> Any:
    return torch.load(path, weights_only=True)


def _to_plain(make: Make, world: World) -> Found:
    """The first worker alone saves; both go on from the file without any `wrap`, on the same data."""
    model: Any = net()
    model, optimizer = world.wrap(model, make(model.parameters()))
    _steps(world, model, optimizer, 0, _HALF)
    path = world.folder / "half.pt"
    if world.rank == 0:
        torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}, path)
    world.meet()
    plain = net()
    own = make(plain.parameters())
    saved = _load(path)
    plain.load_state_dict(saved["model"])
    own.load_state_dict(saved["optimizer"])
    losses = _go_on_plain(plain, own)
    return {"model": plain, "optimizer": own, "wrapped": model, "losses": losses}


def _go_on_plain(plain: nn.Module, own: Any) -> list[float]:
    source = torch.Generator().manual_seed(9)
    losses = []
    for _ in range(_HALF):
        x = torch.randn(16, 16, generator=source)
        loss = mse(plain(x), x[:, :4].tanh())
        loss.backward()
        own.step()
        own.zero_grad()
        losses.append(loss.item())
    return losses


def _from_plain(make: Make, when: str, world: World) -> Found:
    """State of a plain run is loaded before `wrap` or after it."""
    plain = net()
    own = make(plain.parameters())
    _go_on_plain(plain, own)
    saved = {"model": plain.state_dict(), "optimizer": own.state_dict()}
    path = world.folder / f"plain-{world.rank}.pt"
    torch.save(saved, path)
    loaded = _load(path)
    model: Any = net()
    optimizer: Any = make(model.parameters())
    if when == "before":
        model.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
    model, optimizer = world.wrap(model, optimizer)
    if when == "after":
        model.module.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
    _steps(world, model, optimizer, 0, 20)
    return {"model": model, "optimizer": optimizer}


for _name, _make in _MAKERS.items():
    case(f"saved while wrapped, loaded in plain torch: {_name}")(partial(_to_plain, _make))
    case(f"state of plain torch loaded before `wrap`: {_name}")(partial(_from_plain, _make, "before"))
    case(f"state of plain torch loaded after `wrap`: {_name}")(partial(_from_plain, _make, "after"))


def _rolled_back(make: Make, world: World) -> Found:
    """Five steps are undone by loading what was saved before them."""
    model: Any = net()
    model, optimizer = world.wrap(model, make(model.parameters()))
    path = world.folder / "state.pt"
    _steps(world, model, optimizer, 0, 8)
    if world.rank == 0:
        torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}, path)
    world.meet()
    _steps(world, model, optimizer, 8, 14)
    saved = _load(path)
    model.module.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    _steps(world, model, optimizer, 6, 20)
    return {"model": model, "optimizer": optimizer}


for _name in ("SGD", "Adam"):
    case(f"rolled back to a file halfway: {_name}")(partial(_rolled_back, _MAKERS[_name]))


@case("a loaded optimizer's rate counts")
def loaded_rate(world: World) -> Found:
    model: Any = net()
    other = optim.SGD(net().parameters(), 0.002, momentum=0.5)
    model, optimizer = world.wrap(model, optim.SGD(model.parameters(), 0.3, momentum=0.9))
    optimizer.load_state_dict(other.state_dict())
    _steps(world, model, optimizer, 0, 5)
    for group in optimizer.param_groups:
        group["lr"] = 0.05
    _steps(world, model, optimizer, 5, 20)
    return {"model": model, "optimizer": optimizer, "rate": optimizer.param_groups[0]["lr"]}


@case("an optimizer's own state loaded into it")
def loaded_itself(world: World) -> Found:
    """As Accelerate's `prepare` does."""
    model: Any = net()
    model, optimizer = world.wrap(model, optim.Adam(model.parameters(), 0.002))
    optimizer.load_state_dict(optimizer.state_dict())
    for group in optimizer.param_groups:
        group["lr"] = 0.01
    _steps(world, model, optimizer, 0, 20)
    return {"model": model, "optimizer": optimizer}


def _with_scheduler(when: str, world: World) -> Found:
    """A scheduler, too, goes on where it was."""

    def schedule(optimizer: Any) -> Any:
        return optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=30)

    first: Any = net()
    own = optim.Adam(first.parameters(), 0.01)
    past = schedule(own)
    source = torch.Generator().manual_seed(9)
    for _ in range(8):
        x = torch.randn(16, 16, generator=source)
        (mse(first(x), x[:, :4].tanh())).backward()
        own.step()
        own.zero_grad()
        past.step()
    states = (first.state_dict(), own.state_dict(), past.state_dict())
    model: Any = net()
    optimizer: Any = optim.Adam(model.parameters(), 0.01)
    scheduler = schedule(optimizer)
    if when == "after":
        model, optimizer = world.wrap(model, optimizer)
        model.module.load_state_dict(states[0])
    else:
        model.load_state_dict(states[0])
    optimizer.load_state_dict(states[1])
    scheduler.load_state_dict(states[2])
    if when == "before":
        model, optimizer = world.wrap(model, optimizer)
    rates = []
    for x, y in world.batches():
        loss = mse(model(x), y)
        world.note(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        rates.append(scheduler.get_last_lr())
    return {"model": model, "optimizer": optimizer, "rates": rates}


case("scheduler and optimizer loaded before `wrap`")(partial(_with_scheduler, "before"))
case("scheduler and optimizer loaded after `wrap`")(partial(_with_scheduler, "after"))


@case("scaler and optimizer saved by the first worker, loaded by both")
def scaler_saved(world: World) -> Found:
    model: Any = net()
    model, optimizer = world.wrap(model, optim.Adam(model.parameters(), 0.01))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4)
    path = world.folder / "all.pt"
    for step, (x, y) in enumerate(world.batches()):
        if step == 9:
            if world.rank == 0:
                torch.save([scaler.state_dict(), optimizer.state_dict(), model.module.state_dict()], path)
            world.meet()
            states = _load(path)
            scaler = torch.amp.GradScaler("cpu")
            scaler.load_state_dict(states[0])
            optimizer.load_state_dict(states[1])
            model.module.load_state_dict(states[2])
        loss = mse(model(x), y)
        world.note(loss)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer, "scale": scaler.get_scale()}


@case("optimizer state saved by one worker at every fifth step")
def saved_often(world: World) -> Found:
    """The others train on meanwhile."""
    model: Any = net()
    model, optimizer = world.wrap(model, optim.Adam(model.parameters(), 0.01))
    found: dict[str, Any] = {}
    for step, (x, y) in enumerate(world.batches()):
        loss = mse(model(x), y)
        world.note(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 4 and world.rank == 0:
            state = optimizer.state_dict()
            found[f"after {step}"] = [value["exp_avg"].clone() for value in state["state"].values()]
    return {"model": model, "optimizer": optimizer, **found}


@case("names of the saved state are the plain model's")
def names(world: World) -> Found:
    model: Any = nn.Sequential(nn.Linear(16, 32, bias=False), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 4))
    plain, wanted = model, list(model.state_dict())
    model, optimizer = world.wrap(model, optim.Adam(model.parameters(), 0.01))
    _steps(world, model, optimizer, 0, 20)
    assert list(model.module.state_dict()) == wanted == list(plain.state_dict())
    if not world.is_ddp:
        assert list(model.state_dict()) == wanted
        assert [name for name, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
    return {"model": model, "count": len(wanted)}


@case("weights loaded into a part of the model after `wrap`")
def part_loaded(world: World) -> Found:
    plain = net()
    torch.manual_seed(12)
    other = net()
    model, optimizer = world.wrap(plain, optim.Adam(plain.parameters(), 0.01))
    plain[0].load_state_dict(other[0].state_dict())
    _steps(world, model, optimizer, 0, 20)
    return {"model": model, "optimizer": optimizer}


@case("weights initialised after `wrap`")
def initialised_after(world: World) -> Found:
    plain = net()
    model, optimizer = world.wrap(plain, optim.Adam(plain.parameters(), 0.01))

    def start(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)

    torch.manual_seed(31)
    plain.apply(start)
    _steps(world, model, optimizer, 0, 20)
    return {"model": model, "optimizer": optimizer}
