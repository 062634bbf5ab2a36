"""Update rules by name: what workers ask for and shards compute.

The arithmetic is the shards' (`server/rules.py`).
"""

from functools import cache
from typing import Literal

import msgspec

from shoestring.errors import RuleError

_HYPER_NAMES = {
    "sgd": ("lr", "momentum", "dampening", "weight_decay"),
    "adam": ("lr", "beta1", "beta2", "eps", "weight_decay"),
    "adamw": ("lr", "beta1", "beta2", "eps", "weight_decay"),
    "average": (),
    "outer_nesterov": ("lr", "momentum"),
    "mean": (),
}
_FLAGS = {
    "sgd": ("momentum", "nesterov", "maximize"),
    "adam": ("maximize", "amsgrad"),
    "adamw": ("maximize", "amsgrad"),
    "average": (),
    "outer_nesterov": (),
    "mean": (),
}


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Static part of an update rule; what may change from round to round travels as hyperparameters.

    `average` adds the gradient, here the average of what workers' parameters moved in their
    local steps. `outer_nesterov` takes the opposite of that move for a gradient and
    follows it by SGD with Nesterov momentum. `mean` updates nothing: the answer to a round is the mean
    gradient itself, and workers update their parameters.
    """

    kind: Literal["sgd", "adam", "adamw", "average", "outer_nesterov", "mean"]
    momentum: bool = False  # sgd: a momentum buffer exists, as some group has momentum
    nesterov: bool = False
    maximize: bool = False
    amsgrad: bool = False
    keeps: bool = True  # whether what a codec leaves out of an answer goes into the next one

    def __post_init__(self) -> None:
        if self.kind not in _FLAGS:
            raise RuleError(f"there is no update rule `{self.kind}`", hint=f"use one of {', '.join(_FLAGS)}")
        for flag in ("momentum", "nesterov", "maximize", "amsgrad"):
            if getattr(self, flag) and flag not in _FLAGS[self.kind]:
                raise RuleError(
                    f"update rule `{self.kind}` has no `{flag}`",
                    hint=f"leave `{flag}` out, or use another rule",
                )
        if self.nesterov and not self.momentum:
            raise RuleError("`nesterov` is set without `momentum`", hint="give the optimizer a momentum")

    @property
    def moves_parameters(self) -> bool:
        """Whether shards update what workers compute with; else workers do that, by themselves."""
        return self.kind not in ("average", "outer_nesterov", "mean")

    @property
    @cache  # noqa: B019 - a run has one or two rules, and asks for every part of every round
    def hyper_names(self) -> tuple[str, ...]:
        """What each of the hyperparameters of `update` and `apply` is, in order."""
        return _HYPER_NAMES[self.kind]

    @property
    @cache  # noqa: B019 - a run has one or two rules, and asks for every part of every round
    def state_names(self) -> tuple[str, ...]:
        """The vectors, as long as the parameters, that the rule keeps from step to step."""
        if self.kind in ("adam", "adamw"):
            highest = ("max_exp_avg_sq",) if self.amsgrad else ()
            return ("exp_avg", "exp_avg_sq", *highest)
        return ("momentum",) if self.momentum or self.kind == "outer_nesterov" else ()
