"""By what a script multiplies its losses, as torch's `GradScaler` says.

Scaled gradients are pushed unscaled, and what comes back is scaled again: so what a codec keeps of them
counts the same whatever the scale is in a later step. Divided is by a power of two, which is exact: the
scale itself as a rule, else the power of two below it.

Nothing tells a gradient's scale but the scaler. So `watch` has `GradScaler.scale` note the scaler that was
used last, and `unscale_` and `step` tell the optimizer that `wrap` gave; what they compute stays as it is.
"""

import contextlib
import functools
import itertools
import math
import threading
import weakref
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from shoestring.errors import UsageError

_last: "list[weakref.ref[torch.amp.GradScaler]]" = []  # the scaler that was used last, if any
_own = threading.local()  # the same of each thread; hooks of gradients on GPUs run in threads without one
_count = itertools.count(1)
_uses = [0]  # of scalers so far


@runtime_checkable
class Scaled(Protocol):
    """An optimizer that is to know when a scaler works on its gradients."""

    def unscaling(self, scaler: Any) -> contextlib.AbstractContextManager[None]:
        """Around `unscale_`, which divides gradients in place."""

    def stepping(self, scaler: Any) -> contextlib.AbstractContextManager[None]:
        """Around `step`, which looks at gradients in place and then has the optimizer step."""


class LossScale:
    """The scale of the losses of one backward pass. Asked of a GPU when it is needed, not before."""

    def __init__(self) -> None:
        scaler = last_scaler()
        self._tensor: torch.Tensor | None = None if scaler is None else scaler._scale
        if self._tensor is not None and self._tensor.device.type == "cpu":
            self.value = float(self._tensor)  # at once: it costs nothing, and the scaler may change it

    @cached_property
    def value(self) -> float:
        """The scale; 1 without a scaler."""
        return 1.0 if self._tensor is None else float(self._tensor)

    @cached_property
    def inverse(self) -> float:
        """What torch multiplies scaled gradients with: a float32."""
        return float(np.float32(1.0 / self.value)) if self.value else math.inf

    @cached_property
    def power(self) -> float:
        """The largest power of two that is not above the scale; 1 without a scaler."""
        return 2.0 ** (math.frexp(self.value)[1] - 1) if 0 < self.value < math.inf else 1.0


def last_scaler() -> "torch.amp.GradScaler | None":
    """The scaler that was used last, if there was one and it is in use still."""
    noted: Any = getattr(_own, "noted", None) or (_last[0] if _last else None)
    scaler: torch.amp.GradScaler | None = None if noted is None else noted()
    return scaler


@functools.cache
def versions_of_a_look() -> int:
    """By how much a scaler raises the version of a gradient when it looks at it or unscales it."""
    gradient = torch.ones(1)
    torch._amp_foreach_non_finite_check_and_unscale_([gradient], torch.zeros(1), torch.ones(1))
    return gradient._version


def uses() -> int:
    """How often losses have been scaled so far, by whichever scaler."""
    return _uses[0]


def watch() -> None:
    """Have every `GradScaler` noted, and wrapped optimizers told. A second call changes nothing."""
    kind: Any = torch.amp.GradScaler
    if hasattr(kind.scale, "__wrapped__"):
        return
    plain_scale, plain_unscale, plain_step = kind.scale, kind.unscale_, kind.step

    @functools.wraps(plain_scale)
    def scale(self: Any, outputs: Any) -> Any:
        scaled = plain_scale(self, outputs)
        if self.is_enabled():
            _own.noted = weakref.ref(self)
            _last[:] = [_own.noted]
            _uses[0] = next(_count)
        return scaled

    @functools.wraps(plain_unscale)
    def unscale_(self: Any, optimizer: Any) -> Any:
        is_told = self.is_enabled() and isinstance(optimizer, Scaled)
        with optimizer.unscaling(self) if is_told else contextlib.nullcontext():
            return plain_unscale(self, optimizer)

    @functools.wraps(plain_step)
    def step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        is_told = self.is_enabled() and isinstance(optimizer, Scaled)
        with optimizer.stepping(self) if is_told else contextlib.nullcontext():
            return plain_step(self, optimizer, *args, **kwargs)

    kind.scale, kind.unscale_, kind.step = scale, unscale_, step


class Scaling:
    """By what the gradients of one step are scaled, and whether the script steps accordingly.

    Used by the rounds of one optimizer whose gradients leave during backward: then the scale must be known.
    """

    def __init__(self) -> None:
        self.scaler: Any = None  # that is stepping the optimizer
        self.is_unscaled = False  # `unscale_` was called
        self.scale: LossScale | None = None  # to be taken out of gradients that are sent now
        self._uses = uses()
        self._scale: LossScale | None = None  # of the gradients that were sent; none: they are as they are
        self._has_begun = False

    def begin(self) -> None:
        """Find the scale of a step's gradients, when the first of them are sent."""
        self._has_begun = True
        self._scale = LossScale() if self._uses != uses() else None
        self.scale = None if self.is_unscaled else self._scale

    def unscaled(self) -> None:
        """Gradients that are not sent yet are unscaled from now on."""
        self.is_unscaled, self.scale = True, None

    def check(self, *, has_gradients: bool) -> None:
        """Raise unless the optimizer is stepped as its gradients were sent."""
        if not self._has_begun:
            self.begin()
        if self._scale is None:
            if self.scaler is not None and has_gradients:
                raise UsageError(
                    "`scaler.step(optimizer)`, and no loss was scaled with `scaler.scale(loss)` since the "
                    "last step: gradients were sent as they are",
                    hint="`scaler.scale(loss).backward()`, whatever else the loss is multiplied with",
                )
            return
        if self.scaler is None and not self.is_unscaled:
            raise UsageError(
                "`optimizer.step()` with gradients of a loss that a `GradScaler` has scaled: they were sent "
                "during backward, and the scale taken out",
                hint="`scaler.step(optimizer)`; where only some losses are scaled, use "
                "`model = shoestring.wrap(model)`",
            )
        if self.scaler is not None and self.scaler.get_scale() != self._scale.value:
            raise UsageError(
                f"the gradients were sent as scaled by {self._scale.value:g}, and are stepped with another "
                f"scale, {self.scaler.get_scale():g}",
                hint="step with the scaler that has scaled the loss, and call its `update` after its `step`",
            )

    def end(self) -> None:
        """The step is over."""
        self.is_unscaled = self._has_begun = False
        self.scale = self._scale = None
        self._uses = uses()
