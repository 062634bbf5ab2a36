"""By what a script multiplies its losses, as torch's `GradScaler` says.

Scaled gradients are pushed unscaled, and what comes back is scaled again: so what a codec keeps of them
counts the same whatever the scale is in a later step. Divided is by a power of two, which is exact: the
scale itself as a rule, else the power of two below it.

Nothing tells a gradient's scale but the scaler. So `watch` has `GradScaler.scale` note the scaler that was
used last; what it computes stays as it is.
"""

import functools
import math
import weakref
from functools import cached_property
from typing import Any

import torch

_noted: "list[weakref.ref[torch.amp.GradScaler]]" = []  # the one that was used last, if any


class LossScale:
    """The scale of the losses of one backward pass. Asked of a GPU when it is needed, not before."""

    def __init__(self) -> None:
        scaler = last_scaler()
        self._tensor: torch.Tensor | None = None if scaler is None else scaler._scale

    @cached_property
    def power(self) -> float:
        """The largest power of two that is not above the scale; 1 without a scaler."""
        if self._tensor is None:
            return 1.0
        scale = float(self._tensor)
        return 2.0 ** (math.frexp(scale)[1] - 1) if 0 < scale < math.inf else 1.0


def last_scaler() -> "torch.amp.GradScaler | None":
    """The scaler that was used last, if there was one and it is in use still."""
    return _noted[0]() if _noted else None


def watch() -> None:
    """Have every `GradScaler` noted when it scales a loss. A second call changes nothing."""
    kind: Any = torch.amp.GradScaler
    plain = kind.scale
    if hasattr(plain, "__wrapped__"):
        return

    @functools.wraps(plain)
    def scale(self: Any, outputs: Any) -> Any:
        scaled = plain(self, outputs)
        if self.is_enabled():
            _noted[:] = [weakref.ref(self)]
        return scaled

    kind.scale = scale
