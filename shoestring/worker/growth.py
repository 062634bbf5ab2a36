"""A wrapped model whose script trains more parameters than it did when it was wrapped.

Layers that were frozen are trained from some epoch on; a head is replaced by a larger one. Parameters
that are new to the run get rounds of their own, which all workers enter together, before the first
forward pass that finds them.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Protocol

from torch import nn

from shoestring.errors import JoinError


class Rounds(Protocol):
    """The rounds of some of a model's parameters."""

    def no_sync(self) -> contextlib.AbstractContextManager[None]: ...

    def forward_begins(self) -> None: ...


class Growing:
    """All rounds of one model."""

    def __init__(
        self,
        model: nn.Module,
        first: Rounds,
        more: Callable[[set[nn.Parameter]], Rounds],
    ) -> None:
        self._model = model
        self._rounds = [first]
        self._more = more  # joins the run with further parameters
        self._known = trainable(model)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients add up without exchanging them."""
        with contextlib.ExitStack() as stack:
            for rounds in self._rounds:
                stack.enter_context(rounds.no_sync())
            yield

    def forward_begins(self) -> None:
        """Take in the parameters that are trained from now on."""
        new = trainable(self._model) - self._known
        if new:
            self._known |= new
            self._rounds.append(self._join(new))
        for rounds in self._rounds:
            rounds.forward_begins()

    def _join(self, new: set[nn.Parameter]) -> Rounds:
        try:
            return self._more(new)
        except JoinError as error:
            named = [f"`{name}`" for name, value in self._model.named_parameters() if value in new]
            raise JoinError(
                f"{', '.join(named[:3])}{', ...' if len(named) > 3 else ''} "
                f"({len(named)} in all) are trained from now on, but not on every worker: {error.message}",
                hint="unfreeze the same parameters at the same step on all workers",
            ) from error


def trainable(model: nn.Module) -> set[nn.Parameter]:
    """The parameters that get gradients."""
    return {parameter for parameter in model.parameters() if parameter.requires_grad}
