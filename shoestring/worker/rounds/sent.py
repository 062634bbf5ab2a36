"""The gradients of one round, from their backward pass to the step: which parts are whole, and what was sent.

Gradients leave during backward. What a script does to them afterwards (clips them, adds to them, drops
them) would not reach the shards, so it is refused, with the line to write instead. Such a change shows
in the gradient's object or its version; of changes that bypass versions (`.grad.data`) those of one part
in turn show in a sum over its bits.
"""

from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

from shoestring.errors import UsageError
from shoestring.model.parts import Part
from shoestring.worker.replica.replica import Replica
from shoestring.worker.rounds.scale import versions_of_a_look

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes a value
_MEAN = "`model = shoestring.wrap(model)`"


class SentGradients:
    """Follows the gradients of one round. Used by the threads of backward and of the script."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._seen: dict[int, tuple[Tensor, int]] = {}  # by parameter: its gradient and the version of that
        self._sent: dict[int, tuple[Tensor | None, int]] = {}
        self._sums: list[tuple[int, Tensor]] = []  # over the bits of some that were sent, by parameter
        self.parts: set[int] = set()  # that were sent
        self._left = self._all_pieces()

    def arrive(self, index: int) -> Sequence[int]:
        """Note that backward has added to a parameter's gradient; return the parts that are whole now."""
        gradient = self._replica.parameters[index].grad
        if gradient is None:
            return ()
        parts = self._replica.parts_of_parameter[index]
        before = self._seen.get(index)
        self._seen[index] = (gradient, gradient._version)
        if before is not None:
            is_dropped = gradient is not before[0] or gradient._version > before[1] + 1
            if is_dropped and self.parts:
                self._refuse_dropped(index)
            if any(part in self.parts for part in parts):
                self._refuse_second(index)
            if not is_dropped:
                return ()
            self._seen = {index: self._seen[index]}  # a fresh start: nothing was sent of what was dropped
            self._left = self._all_pieces()
        for part in parts:
            self._left[part] -= 1
        return [part for part in parts if self._left[part] == 0]

    def send(self, part: Part, seq: int) -> None:
        """Note the gradients of a part as they are sent in round `seq`."""
        self.parts.add(part.index)
        is_summed = part.index == seq % len(self._replica.parts)
        for piece in part.pieces:
            gradient = self._replica.parameters[piece.tensor].grad
            self._sent[piece.tensor] = (gradient, -1 if gradient is None else gradient._version)
            if is_summed and gradient is not None and not gradient.is_sparse:
                self._sums.append((piece.tensor, _sum_of_bits(gradient)))

    def check(self) -> None:
        """Raise if a gradient is not what was sent of it."""
        for index, (gradient, version) in self._sent.items():
            own = self._replica.parameters[index].grad
            if own is None and gradient is not None:
                self._refuse_dropped(index)
            if own is not gradient or (own is not None and own._version != version):
                self._refuse_changed(index)
        for index, bits in self._sums:
            gradient = self._sent[index][0]
            if gradient is not None and not torch.equal(bits, _sum_of_bits(gradient)):
                self._refuse_changed(index)

    def accept(self) -> None:
        """Take gradients as they are now for what was sent, as a `GradScaler` has worked on them in place.

        Raise if anything else has changed them, too.
        """
        for index, (gradient, version) in self._sent.items():
            if gradient is not self._replica.parameters[index].grad:
                self._refuse_changed(index)
            if gradient is not None:
                if gradient._version > version + versions_of_a_look():
                    self._refuse_changed(index)
                self._sent[index] = (gradient, gradient._version)
        self._sums = [
            (index, _sum_of_bits(gradient))
            for index, gradient in ((index, self._sent[index][0]) for index, _ in self._sums)
            if gradient is not None
        ]

    def clear(self) -> None:
        """Begin another round."""
        self._seen.clear()
        self._sent.clear()
        self._sums.clear()
        self.parts.clear()
        self._left = self._all_pieces()

    def _all_pieces(self) -> list[int]:
        return [len(part.pieces) for part in self._replica.parts]

    def _refuse_changed(self, index: int) -> NoReturn:
        raise UsageError(
            f"the gradient of `{self._name(index)}` was changed after it was sent, which is during backward",
            hint="clip by norm with `wrap(..., clip_norm=...)`; for clipping by value and all other changes "
            f"use {_MEAN}: there `.grad` is the mean of all workers' when `backward()` returns",
        )

    def _refuse_dropped(self, index: int) -> NoReturn:
        raise UsageError(
            f"the gradient of `{self._name(index)}` was dropped without `optimizer.step()`, after it was "
            "sent during backward: the shards wait for that step",
            hint=f"use {_MEAN}, which takes dropped gradients, or decide before `backward()` whether to step",
        )

    def _refuse_second(self, index: int) -> NoReturn:
        raise UsageError(
            f"a second backward pass changed the gradient of `{self._name(index)}`, "
            "which is on its way already",
            hint=f"put all but the last backward pass of a step into `with model.no_sync():`, or use {_MEAN}",
        )

    def _name(self, index: int) -> str:
        return self._replica.tensors[index].name


def _sum_of_bits(gradient: Tensor) -> Tensor:
    return gradient.detach().view(_BITS[gradient.element_size()]).sum()
