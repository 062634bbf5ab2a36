"""Which shard rule does what a torch optimizer would do."""

from typing import Any

import torch

from shoestring.errors import RuleError
from shoestring.model.rules import Rule

_HINT = "use torch.optim.SGD, Adam or AdamW, or `LocalSteps`, which leaves the optimizer on the worker"


def rule_of(optimizer: torch.optim.Optimizer) -> Rule:
    """Return the rule for an optimizer, or refuse it: it is never run otherwise than it says."""
    kinds: dict[type[torch.optim.Optimizer], str] = {
        torch.optim.SGD: "sgd",
        torch.optim.Adam: "adam",
        torch.optim.AdamW: "adamw",
    }
    kind = kinds.get(type(optimizer))
    if kind is None:
        raise RuleError(f"the shards have no rule for `{type(optimizer).__name__}`", hint=_HINT)
    groups = optimizer.param_groups
    for setting in ("maximize", "nesterov", "amsgrad", "decoupled_weight_decay"):
        if len({bool(group.get(setting, False)) for group in groups}) > 1:
            raise RuleError(f"`{setting}` differs between parameter groups", hint="give all groups the same")
    if any(group.get("differentiable") for group in groups):
        raise RuleError("`differentiable=True` has no rule on the shards", hint="leave it out")
    first = groups[0]
    if kind == "adam" and first.get("decoupled_weight_decay"):
        kind = "adamw"
    if kind == "sgd":
        return Rule(
            "sgd",
            momentum=any(group["momentum"] != 0 for group in groups),
            nesterov=bool(first["nesterov"]),
            maximize=bool(first["maximize"]),
        )
    return Rule(
        "adamw" if kind == "adamw" else "adam",
        maximize=bool(first["maximize"]),
        amsgrad=bool(first["amsgrad"]),
    )


def hyper_of(rule: Rule, groups: list[dict[str, Any]]) -> list[list[float]]:
    """Return each group's hyperparameters as they are now, in the order of the rule's names.

    Raise if the groups have come to want another rule than the one that the shards follow.
    """
    wanted = {
        "nesterov": rule.nesterov,
        "maximize": rule.maximize,
        "amsgrad": rule.amsgrad,
        "decoupled_weight_decay": rule.kind == "adamw",
    }
    for group in groups:
        for setting, value in wanted.items():
            if bool(group.get(setting, value)) != value:
                raise _not_the_rule(setting, group[setting], value)
        if rule.kind == "sgd" and group["momentum"] != 0 and not rule.momentum:
            raise _not_the_rule("momentum", group["momentum"], 0)
    return [[_value(group, name) for name in rule.hyper_names] for group in groups]


def _not_the_rule(setting: str, value: Any, before: Any) -> RuleError:
    return RuleError(
        f"`{setting}` of the optimizer is {value}, and was {before} when it was wrapped",
        hint=f"give the optimizer its `{setting}` before `wrap`: the shards keep to the rule of then",
    )


def _value(group: dict[str, Any], name: str) -> float:
    if name in ("beta1", "beta2"):
        return float(group["betas"][name == "beta2"])
    return float(group[name])
