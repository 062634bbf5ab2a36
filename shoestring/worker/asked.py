"""What a script asks `wrap` for: with its settings checked, and what else follows from them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from shoestring.codec.registry import LOSSLESS, make
from shoestring.errors import RuleError, UsageError
from shoestring.model.rules import Rule
from shoestring.worker.batchnorm.layers import shared_layers
from shoestring.worker.module.growth import names_of
from shoestring.worker.optimizer import SharedOptimizer
from shoestring.worker.optimizers import rule_of
from shoestring.worker.rounds.auto import AUTO
from shoestring.worker.rounds.policy import (
    AnyPolicy,
    AutoPolicy,
    EveryStep,
    LocalSteps,
    Policy,
    text_of,
)
from shoestring.worker.session import Session

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


@dataclass(frozen=True)
class Asked:
    """How a model is to be trained."""

    codec: str
    policy: Policy
    clip_norm: float
    is_auto_batch: bool
    follows_buffers: bool
    auto: AutoPolicy | None = None  # by which another policy may be chosen later

    @property
    def text(self) -> str:
        """The policy as all workers must name it."""
        return text_of(self.auto or self.policy)


def say_what_differs(here: Session, policy: Policy) -> None:
    """Say what clipping, loss scaling and moments are with a policy under which they are not DDP's."""
    if here.run.worker or here.run.workers == 1 or isinstance(policy, EveryStep):
        return
    if isinstance(policy, LocalSteps):
        here.notice(
            "with local steps clipping, loss scaling and the optimizer's moments are each worker's own, from "
            "its own gradients, and so is what `optimizer.state_dict()` gives"
        )
    else:
        here.notice(
            f"with policy `{policy.text}` moments take in one worker's gradient at a time, an overflow skips "
            "the step of its worker alone, and gradients are not clipped by the norm of their mean"
        )


def settle(
    here: Session, model: nn.Module, optimizer: Optimizers | None, asked: Asked, given: AnyPolicy
) -> Asked:
    """Take the policy that is given. `auto` begins with every step, and may change to local steps later."""
    if not isinstance(given, AutoPolicy):
        return replace(asked, policy=settled(given, optimizer))
    asked = replace(asked, policy=EveryStep(warmup=given.warmup))
    why = _why_every_step(here, model, optimizer, asked)
    if not why:
        return replace(asked, auto=given)
    if here.run.worker == 0 and here.run.workers > 1:
        here.notice(f"policy `auto` stays with a round every step: {why}")
    return asked


def _why_every_step(here: Session, model: nn.Module, optimizer: Optimizers | None, asked: Asked) -> str:
    """Why a run cannot go on with local steps once it has begun; empty if it can."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    reasons = {
        "the optimizer is the script's own": not isinstance(optimizer, torch.optim.Optimizer),
        f"codec `{asked.codec}` was named": asked.codec != AUTO,
        "`clip_norm` is of every step's mean gradient": bool(asked.clip_norm),
        "there is one worker": here.run.workers == 1,
        "checkpoints of the run hold the state that the shards have": here.run.checkpoint is not None,
        "BatchNorm layers share their statistics": any(True for _ in shared_layers(model)),
        "parameters are not float32": any(parameter.dtype != torch.float32 for parameter in trained),
    }
    return next((why for why, is_so in reasons.items() if is_so), "")


def why_on_workers(model: nn.Module, optimizer: Optimizers | None, policy: Policy) -> str:
    """Why the shards cannot do what the optimizer does; empty if they can, or are not asked to."""
    if optimizer is None or isinstance(policy, LocalSteps):
        return ""
    if not isinstance(optimizer, torch.optim.Optimizer):
        return "there are several"
    try:
        rule_of(optimizer)
    except RuleError as error:
        return error.message
    if any(parameter.dtype == torch.float64 for parameter in model.parameters()):
        return "parameters are float64, and shards compute in float32"
    return ""


def check(optimizer: Optimizers | None, asked: Asked, batch: str) -> None:
    """Refuse settings that do not go together."""
    codec, policy, clip_norm = asked.codec, asked.policy, asked.clip_norm
    if batch not in ("even", "auto"):
        raise UsageError(f'batch="{batch}"', hint='give "auto", or "even" for what the sampler says')
    if isinstance(optimizer, SharedOptimizer):
        raise UsageError("this optimizer is wrapped already", hint="call `wrap` once for each model")
    if clip_norm < 0 or (clip_norm and not isinstance(policy, EveryStep)):
        raise UsageError(
            f"clip_norm={clip_norm} with {policy}",
            hint="give a positive norm with `EveryStep`; with other policies clip on the worker",
        )
    if codec != AUTO:
        make(codec)


def is_lossless(codec: str) -> bool:
    """Whether a codec leaves nothing out."""
    return codec != AUTO and make(codec).name == LOSSLESS


def check_means(policy: Policy, clip_norm: float, why: str) -> None:
    """Refuse what does not go with an optimizer that runs on the workers."""
    if clip_norm:
        raise UsageError(
            f"clip_norm={clip_norm:g} where the optimizer runs on the workers" + why,
            hint="`model = shoestring.wrap(model)`, and clip after `backward` as usual: "
            "`torch.nn.utils.clip_grad_norm_(model.parameters(), norm)`",
        )
    if not isinstance(policy, EveryStep) or policy.delay:
        raise UsageError(
            f"policy `{text_of(policy)}` where gradients are exchanged in every backward pass" + why,
            hint="leave the policy out; or take `local:8`, say, with `wrap(model, optimizer)`, whose local "
            "steps go with any optimizer",
        )


def rule_for(optimizer: torch.optim.Optimizer, policy: Policy) -> Rule:
    """What the shards are to do with a round."""
    if not isinstance(policy, LocalSteps):
        return rule_of(optimizer)
    return Rule("outer_nesterov" if policy.outer == "nesterov" else "average", keeps=policy.keep is not False)


def settled(policy: Policy, optimizer: Optimizers | None) -> Policy:
    """Whether local steps keep what codecs leave out, if that is left to the kind of the optimizer."""
    if not isinstance(policy, LocalSteps) or policy.keep is not None:
        return policy
    return replace(policy, keep="adam" not in type(optimizer).__name__.lower())


def check_growth(here: Session, model: nn.Module, asked: Asked, new: set[nn.Parameter]) -> None:
    """Refuse parameters that were not trained when the model was wrapped, where they cannot be taken in."""
    why = ""
    if not isinstance(asked.policy, EveryStep):
        why = f"policy `{text_of(asked.policy)}` takes none in"
    elif asked.clip_norm:
        why = "`clip_norm` is by the norm over all parameters"
    elif here.run.checkpoint is not None:
        why = "the run's checkpoints hold those that were trained from the start"
    if why:
        raise UsageError(
            f"{names_of(model, new)} are trained from now on, but not since `wrap`: {why}",
            hint="unfreeze them before `wrap`; or use `model = shoestring.wrap(model)`, which takes them in",
        )
