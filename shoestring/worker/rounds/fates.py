"""What becomes of each gradient after its round: a step is taken with it, or it is thrown away.

A generator's step leaves gradients in the discriminator that the script then sets to zero; a step whose
gradients overflowed is skipped. What a codec left out of such a gradient is not kept. So before the
next round each parameter's last gradient gets its fate: taken if an optimizer has stepped, or the
parameter was changed in place; discarded if the gradient is gone or zero without that; open if it is
still there, and another backward pass adds to it.

What is in `.grad` when a backward pass is the first to add to it after a round is the same on all workers:
it is remembered as `agreed`, until the next round is over.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from shoestring.wire.messages import DISCARDED, OPEN, TAKEN


class Fates:
    """Follows the gradients of some parameters. Used by the threads of backward and of the script."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.agreed: list[Tensor | None] = [None] * len(parameters)
        self._parameters = tuple(parameters)
        self._indices = {parameter: index for index, parameter in enumerate(parameters)}
        self._fates = bytearray(len(parameters))
        self._is_known = [False] * len(parameters)  # the fate of its last gradient
        self._has_stepped = [True] * len(parameters)  # since its last round
        self._versions = [parameter._version for parameter in parameters]
        self._gradients = [0] * len(parameters)  # the version of each gradient when its round ended
        self._is_first = True
        self._hook: Any = register_optimizer_step_post_hook(self._stepped)

    def arrive(self, index: int, *, is_first: bool) -> None:
        """A backward pass is about to add to a gradient; `is_first`: the first one since the last round."""
        self._look(index)
        gradient = self._parameters[index].grad
        if gradient is None:
            self.agreed[index] = None
        elif is_first and not self._is_first:
            self.agreed[index] = gradient.detach().clone()

    def _look(self, index: int) -> None:
        """Find out what has become of the last gradient of a parameter."""
        if self._has_stepped[index]:
            self._fates[index] = TAKEN
        if self._is_known[index]:
            return
        self._is_known[index] = True
        parameter = self._parameters[index]
        gradient = parameter.grad
        if self._has_stepped[index] or parameter._version != self._versions[index]:
            fate = TAKEN
        elif gradient is None or (gradient._version != self._gradients[index] and not _any(gradient)):
            fate = DISCARDED
        else:
            fate = OPEN
        self._fates[index] = fate

    def of(self, indices: Sequence[int]) -> bytes:
        """The fates of some parameters' last gradients; empty if all were taken."""
        for index in indices:
            self._look(index)
            if self._parameters[index].grad is None:
                self.agreed[index] = None
        fates = bytes(self._fates[index] for index in indices)
        return fates if any(fates) else b""

    def round_ends(self) -> None:
        """The gradients are those of a new round: their fates are not known yet."""
        self._is_first = False
        for index, parameter in enumerate(self._parameters):
            if not self._is_known[index] or self._fates[index] != OPEN:
                self._has_stepped[index] = False
                self._versions[index] = parameter._version
            self._gradients[index] = -1 if parameter.grad is None else parameter.grad._version
            self._is_known[index] = False
            self.agreed[index] = None

    def close(self) -> None:
        """Hear of optimizers no longer."""
        self._hook.remove()

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                index = self._indices.get(parameter)
                if index is not None:
                    self._has_stepped[index] = True


def _any(gradient: Tensor) -> bool:
    return bool(gradient.detach().any())
