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
        trained: Callable[[], set[nn.Parameter]] | None = None,
    ) -> None:
        self._model = model
        self._rounds = [first]
        self._more = more  # joins the run with further parameters
        self._trained = trained or (lambda: trainable(model))
        self._known = self._trained()

    @property
    def is_grown(self) -> bool:
        """Whether parameters have come that were not trained at first."""
        return len(self._rounds) > 1

    def go_on_with(self, rounds: Rounds) -> None:
        """Take other rounds of all parameters from now on, with another policy."""
        self._rounds = [rounds]

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients add up without exchanging them."""
        with contextlib.ExitStack() as stack:
            for rounds in self._rounds:
                stack.enter_context(rounds.no_sync())
            yield

    def forward_begins(self) -> None:
        """Take in the parameters that are trained from now on."""
        self.take_in()
        for rounds in self._rounds:
            rounds.forward_begins()

    def take_in(self) -> None:
        """As `forward_begins` does, for a script that has called parts of the model, but not the model."""
        new = self._trained() - self._known
        if new:
            self._known |= new
            self._rounds.append(self._join(new))

    def _join(self, new: set[nn.Parameter]) -> Rounds:
        try:
            return self._more(new)
        except JoinError as error:
            raise JoinError(
                f"{names_of(self._model, new)} are trained from now on, "
                f"but not on every worker: {error.message}",
                hint="unfreeze the same parameters at the same step on all workers",
            ) from error


def names_of(model: nn.Module, parameters: set[nn.Parameter]) -> str:
    """A few of the names of some parameters, and how many they are."""
    named = [f"`{name}`" for name, value in model.named_parameters() if value in parameters]
    return f"{', '.join(named[:3])}{', ...' if len(named) > 3 else ''} ({len(named)} in all)"


def trainable(model: nn.Module) -> set[nn.Parameter]:
    """The parameters that get gradients."""
    return {parameter for parameter in model.parameters() if parameter.requires_grad}
