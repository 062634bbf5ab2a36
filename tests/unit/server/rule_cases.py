"""Update rules with their hyperparameters, for every test of the rules to run over."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shoestring.codec.base import Vector
from shoestring.model.rules import Rule

State = dict[str, Vector]


@dataclass(frozen=True)
class Case:
    rule: Rule
    hyper: dict[str, float]
    flags: dict[str, Any] = field(default_factory=dict)  # of torch's optimizer

    def hyper_of(self, step: int) -> list[float]:
        """The learning rate is another one in every step."""
        changed = dict(self.hyper)
        if "lr" in changed:
            changed["lr"] *= 0.55 + 0.45 * np.cos(step / 50)
        return [changed[name] for name in self.rule.hyper_names]


def sgd(
    lr: float = 0.1, momentum: float = 0.0, dampening: float = 0.0, decay: float = 0.0, **flags: bool
) -> Case:
    hyper = {"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": decay}
    return Case(Rule("sgd", momentum=momentum != 0, **flags), hyper, flags)


def adam(
    kind: str = "adam",
    lr: float = 0.01,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    decay: float = 0.0,
    **flags: bool,
) -> Case:
    hyper = {"lr": lr, "beta1": betas[0], "beta2": betas[1], "eps": eps, "weight_decay": decay}
    return Case(Rule(kind, **flags), hyper, flags)


TORCH_CASES = {
    "sgd": sgd(),
    "sgd decay": sgd(decay=0.01),
    "sgd maximize decay": sgd(lr=1e-3, decay=0.01, maximize=True),
    "momentum": sgd(momentum=0.9),
    "momentum dampening": sgd(momentum=0.8, dampening=0.3),
    "momentum decay": sgd(momentum=0.9, decay=0.01),
    "nesterov": sgd(momentum=0.9, nesterov=True),
    "nesterov decay": sgd(momentum=0.5, decay=0.1, nesterov=True),
    "adam": adam(),
    "adam decay": adam(decay=0.01),
    "adam large eps": adam(eps=0.1),
    # With less to remember, Adam needs eps to come to rest: without, it walks at full speed round the goal.
    "adam short": adam(betas=(0.5, 0.9), eps=0.1),
    "adam maximize": adam(lr=1e-3, maximize=True),
    "amsgrad": adam(amsgrad=True),
    "amsgrad decay": adam(decay=0.01, amsgrad=True),
    "adamw": adam("adamw"),
    "adamw decay": adam("adamw", decay=0.1),
    "adamw amsgrad": adam("adamw", decay=0.1, betas=(0.8, 0.95), amsgrad=True),
}
CASES = TORCH_CASES | {
    "momentum off": Case(Rule("sgd", momentum=True), sgd(decay=0.01).hyper),
    "average": Case(Rule("average"), {}),
    "outer nesterov": Case(Rule("outer_nesterov"), {"lr": 0.7, "momentum": 0.9}),
}


def new_state(rule: Rule, size: int) -> State:
    """Nothing may depend on what memory held before the first step."""
    return {name: np.full(size, np.nan, np.float32) for name in rule.state_names}
