"""Learning-rate schedules, made before `wrap` and after it."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn, optim
from torch.optim import lr_scheduler as schedules

from benchmarks.compatibility.case import STEPS, Found, World, case
from benchmarks.compatibility.cases.basics import mse, net

Make = Callable[[Any], Any]

_SGD = partial(optim.SGD, lr=0.05, momentum=0.9)
_ADAM = partial(optim.Adam, lr=0.01)


def _sequence(own: Any) -> Any:
    first = schedules.LinearLR(own, 0.2, total_iters=5)
    return schedules.SequentialLR(own, [first, schedules.CosineAnnealingLR(own, STEPS - 5)], [5])


SCHEDULES: dict[str, tuple[Callable[..., optim.Optimizer], Make]] = {
    "StepLR": (_SGD, lambda own: schedules.StepLR(own, 5, 0.5)),
    "MultiStepLR": (_ADAM, lambda own: schedules.MultiStepLR(own, [5, 12], 0.3)),
    "ExponentialLR": (_SGD, lambda own: schedules.ExponentialLR(own, 0.95)),
    "CosineAnnealingLR": (_ADAM, lambda own: schedules.CosineAnnealingLR(own, STEPS)),
    "CosineAnnealingWarmRestarts": (_SGD, lambda own: schedules.CosineAnnealingWarmRestarts(own, 7)),
    "LambdaLR": (_ADAM, lambda own: schedules.LambdaLR(own, lambda step: min(1.0, (step + 1) / 8))),
    "OneCycleLR, momentum": (_SGD, lambda own: schedules.OneCycleLR(own, 0.1, total_steps=STEPS + 1)),
    "OneCycleLR, betas": (_ADAM, lambda own: schedules.OneCycleLR(own, 0.03, total_steps=STEPS + 1)),
    "CyclicLR": (_SGD, lambda own: schedules.CyclicLR(own, 0.01, 0.1, step_size_up=4)),
    "a sequence with warm-up": (_ADAM, _sequence),
    "ReduceLROnPlateau": (_SGD, lambda own: schedules.ReduceLROnPlateau(own, factor=0.5, patience=2)),
}


def _scheduled(kind: str, is_before: bool, world: World) -> Found:
    make, schedule = SCHEDULES[kind]
    model: nn.Module = net()
    optimizer: Any = make(model.parameters())
    scheduler = schedule(optimizer) if is_before else None
    model, optimizer = world.wrap(model, optimizer)
    scheduler = scheduler or schedule(optimizer)
    rates = []
    for x, y in world.batches():
        loss = mse(model(x), y)
        world.note(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if kind == "ReduceLROnPlateau":
            scheduler.step(1.0)  # what is watched gets no better
        else:
            scheduler.step()
        rates.append(scheduler.get_last_lr())
    return {"model": model, "optimizer": optimizer, "rates": rates}


for _kind in SCHEDULES:
    case(f"{_kind}, before `wrap`")(partial(_scheduled, _kind, True))
    case(f"{_kind}, after `wrap`")(partial(_scheduled, _kind, False))
