"""Backward passes whose gradients become the mean of all workers', and nothing else.

What DistributedDataParallel does: when `backward` returns, every parameter's `.grad` is the mean, from
the same bits on every worker, and the script's own optimizers, clipping, scaling and logging go on from
there. Every synchronised backward pass is a round. A part is pushed as soon as backward has made all its
gradients; when backward ends, the rest is pushed and the answers are waited for.

With a codec that loses nothing the whole `.grad` is exchanged, as DDP does it. With any other, what has
been added to it since the last round: a gradient that all workers agree on is not coded twice. Then the
rounds keep book of what becomes of each gradient (`Fates`), because what a codec left out of one that is
thrown away must not come back in a later one.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoestring.codec.base import Vector
from shoestring.errors import UsageError
from shoestring.model.parts import Part, unpack_used
from shoestring.wire.messages import WHOLE_ROUND
from shoestring.worker.coder import PartCoder, Terms
from shoestring.worker.replica.device import Ready
from shoestring.worker.replica.replica import Replica
from shoestring.worker.rounds.fates import Fates
from shoestring.worker.rounds.pilot import Pilot
from shoestring.worker.rounds.scale import LossScale, watch
from shoestring.worker.rounds.sharing import Sharing


@dataclass(frozen=True)
class MeanGradient:
    """The gradient of one part, to be pushed."""

    replica: Replica
    part: Part
    ready: Ready | None
    used: NDArray[np.bool_]  # the pieces that have a gradient since the last round
    agreed: tuple[Tensor | None, ...]  # of each piece's gradient, what the last round brought; none: nothing
    fates: bytes
    is_whole: bool  # whether `.grad` is pushed as it is
    scale: LossScale | None  # that is to be taken out of it

    @property
    def device(self) -> torch.device | None:
        return self.replica.device_of(self.part)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to push."""
        gradients = (parameter.grad for parameter in self.replica.of(self.part))
        return not self.used.any() and not (self.is_whole and any(g is not None for g in gradients))

    @property
    def spared(self) -> list[tuple[int, int]]:
        """The ranges of the pieces that have no gradient."""
        offsets = self.part.layout.offsets
        return [(offsets[piece], offsets[piece + 1]) for piece in np.flatnonzero(~self.used).tolist()]

    def read(self, memory: Vector | None, feedback: Vector | None) -> tuple[Vector, NDArray[np.bool_]]:
        flat: Vector = np.empty(self.part.size, np.float32) if memory is None else memory
        self._fill(flat, feedback)
        return flat, self.used

    @property
    def is_wide(self) -> bool:
        """Whether any of it is float64."""
        return any(parameter.dtype == torch.float64 for parameter in self.replica.of(self.part))

    def read_wide(self) -> NDArray[np.float64]:
        """Copy it to the host, in float64."""
        flat = np.empty(self.part.size, np.float64)
        self._fill(flat, None)
        return flat

    def _fill(self, flat: NDArray[Any], feedback: Vector | None) -> None:
        offsets = self.part.layout.offsets
        for place, values in enumerate(self._pieces()):
            own = flat[offsets[place] : offsets[place + 1]]
            if values is None:
                own[:] = 0
            else:
                torch.from_numpy(own).copy_(values)
                if feedback is not None:
                    own += feedback[offsets[place] : offsets[place + 1]]

    def gather(self, feedback: Tensor | None) -> tuple[Tensor, NDArray[np.bool_]]:
        offsets = self.part.layout.offsets
        device = self.replica.of(self.part)[0].device
        flat = torch.zeros(self.part.size, dtype=torch.float32, device=device)
        for place, values in enumerate(self._pieces()):
            if values is not None:
                own = flat[offsets[place] : offsets[place + 1]]
                own.copy_(values)
                if feedback is not None:
                    own.add_(feedback[offsets[place] : offsets[place + 1]])
        return flat, self.used

    def _pieces(self) -> Iterator[Tensor | None]:
        """What is pushed of each piece; none: zeros."""
        parameters = self.replica.of(self.part)
        for piece, parameter, is_used, agreed in zip(
            self.part.pieces, parameters, self.used, self.agreed, strict=True
        ):
            gradient = parameter.grad
            if gradient is None or not (is_used or self.is_whole):
                yield None
                continue
            values = gradient.detach().reshape(-1)[piece.start : piece.stop]
            if agreed is not None:
                values = values.float() - agreed.reshape(-1)[piece.start : piece.stop].float()
            if self.scale is not None and self.scale.power != 1:
                values = values.float() / self.scale.power
            yield values


class MeanTarget:
    """Writes the mean of a part into `.grad`, where any worker had one."""

    def __init__(self, replica: Replica, agreed: Callable[[int], Tensor | None]) -> None:
        self._replica = replica
        self._agreed = agreed  # what the means are added to, by parameter
        self.scale: LossScale | None = None  # that was taken out of what was pushed
        self._used: dict[int, NDArray[np.bool_]] = {}

    def device_of(self, part: Part) -> torch.device | None:
        return self._replica.device_of(part)

    def expect(self, part: Part, used: bytes) -> None:
        """Take note of the pieces that had a gradient on any worker."""
        self._used[part.index] = unpack_used(used, len(part.pieces))

    def write(self, part: Part, values: Vector) -> None:
        """Set the gradients of a part to the mean."""
        self._scatter(part, torch.from_numpy(np.array(values)))

    @contextlib.contextmanager
    def on_host(self, part: Part) -> Iterator[Vector]:
        mean: Vector = np.zeros(part.size, np.float32)
        yield mean
        self._scatter(part, torch.from_numpy(mean))

    @contextlib.contextmanager
    def on_device(self, part: Part) -> Iterator[Tensor]:
        device = self._replica.of(part)[0].device
        mean = torch.zeros(part.size, dtype=torch.float32, device=device)
        yield mean
        self._scatter(part, mean)

    def _scatter(self, part: Part, mean: Tensor) -> None:
        offsets = part.layout.offsets
        used = self._used.pop(part.index)
        for place, piece in enumerate(part.pieces):
            if not used[place]:
                continue
            parameter = self._replica.parameters[piece.tensor]
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradient, agreed = parameter.grad.detach(), self._agreed(piece.tensor)
            values = mean[offsets[place] : offsets[place + 1]]
            if self.scale is not None and self.scale.power != 1:
                values = values * self.scale.power
            if agreed is not None:
                before = agreed.reshape(-1)[piece.start : piece.stop]
                values = before.to(values.dtype) + values.to(before.device)
            if gradient.is_contiguous():
                gradient.view(-1)[piece.start : piece.stop].copy_(values)
            else:  # e.g. channels last: change a copy in the order of the shape, then write it back
                copy = gradient.reshape(-1)
                copy[piece.start : piece.stop] = values.to(copy)
                gradient.copy_(copy.view(gradient.shape))


class LoneRounds:
    """The only worker of a run: its gradients are the mean."""

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Nothing to do: nothing is sent."""
        return contextlib.nullcontext()

    def forward_begins(self) -> None:
        """Nothing to do."""


class MeanRounds:
    """Turns backward passes into rounds whose answers are the mean gradient."""

    def __init__(
        self,
        replica: Replica,
        coder: PartCoder,
        pilot: Pilot,
        *,
        is_whole: bool,
        first_round: int,
        sharing: Sharing,
    ) -> None:
        self.replica = replica
        self.coder = coder
        self.pilot = pilot
        self.rounds = sharing.step = first_round - 1
        self.on_round: list[Callable[[int], None]] = []  # called after every round
        self._sharing = sharing
        self._is_whole = is_whole
        self._is_synced = True
        self._will_sync: bool | None = None  # as the last forward pass found it; none: there was none
        self._fates = None if is_whole else Fates(replica.parameters)
        watch()
        self._terms: Terms | None = None
        self._touched = [False] * len(replica.parameters)  # has a gradient since the last round
        self._target = MeanTarget(replica, self._agreed)
        self._hooks: list[Any] = []
        self._reset()
        for index, parameter in enumerate(replica.parameters):
            hooked: Any = parameter
            if self._fates is not None:
                self._hooks.append(hooked.register_hook(self._before(index)))
            self._hooks.append(hooked.register_post_accumulate_grad_hook(self._after(index)))

    @property
    def steps(self) -> int:
        """How many rounds this worker has taken part in."""
        return self.rounds

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let forward and backward passes add up gradients without exchanging them."""
        before, self._is_synced = self._is_synced, False
        try:
            yield
        finally:
            self._is_synced = before

    def forward_begins(self) -> None:
        """As with DDP, the context that the forward pass is in says whether its gradients are exchanged."""
        self._will_sync = self._is_synced

    def close(self) -> None:
        """Watch gradients and optimizers no longer."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if self._fates is not None:
            self._fates.close()

    def _agreed(self, index: int) -> Tensor | None:
        return None if self._fates is None else self._fates.agreed[index]

    def _before(self, index: int) -> Callable[[Tensor], None]:
        def is_coming(_: Tensor) -> None:
            if self._fates is not None:
                self._fates.arrive(index, is_first=not self._touched[index])

        return is_coming

    def _after(self, index: int) -> Callable[[Tensor], None]:
        parts = self.replica.parts_of_parameter[index]

        def is_there(parameter: Tensor) -> None:
            if parameter.grad is not None and parameter.grad.is_sparse:
                raise UsageError(
                    f"the gradient of `{self.replica.tensors[index].name}` is sparse",
                    hint="make the embedding with `sparse=False`",
                )
            self._touched[index] = True
            if not (self._is_synced if self._will_sync is None else self._will_sync):
                return
            terms = self._open()
            if any(part in self._pushed for part in parts):
                raise UsageError(
                    f"the gradient of `{self.replica.tensors[index].name}` came twice in one backward pass",
                    hint="use checkpointing with `use_reentrant=False`; after a backward pass that failed, "
                    "start the workers again",
                )
            for part in parts:
                ready = self._ready[part]
                if ready is not None:
                    ready.note([parameter])
                self._left[part] -= 1
                if self._left[part] == 0:
                    self._push(self.replica.parts[part], terms)

        return is_there

    def _open(self) -> Terms:
        """The terms of the round that this backward pass is; it ends with the pass."""
        if self._terms is None:
            if self._fates is not None:
                self._target.scale = LossScale()
            self._terms = self.pilot.terms(self.rounds + 1, [[]], self._sharing.weigh(), WHOLE_ROUND)
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._finish)
        return self._terms

    def _push(self, part: Part, terms: Terms) -> None:
        self._pushed.add(part.index)
        ready = self._ready[part.index]
        if ready is not None:
            ready.note(self.replica.of(part))
            ready.close()
        indices = [piece.tensor for piece in part.pieces]
        for index in indices:
            if self.replica.parameters[index].grad is None:  # or no longer
                self._touched[index] = False
        fates = b"" if self._fates is None else self._fates.of(indices)
        used = np.array([self._touched[index] for index in indices])
        agreed = tuple(self._agreed(index) for index in indices)
        source = MeanGradient(
            self.replica, part, ready, used, agreed, fates, self._is_whole, self._target.scale
        )
        self.coder.push(part, terms, source)

    def _finish(self) -> None:
        """The backward pass has ended: push what is left, then bring the means."""
        terms = self._open()
        self.pilot.backward_done()
        for part in reversed(self.replica.parts):
            if part.index not in self._pushed:
                self._push(part, terms)
        self.coder.exchange.wait_sent()
        self.pilot.hear(self.coder.collect(terms.seq, self._target))
        self.rounds = self._sharing.step = terms.seq
        if self._fates is not None:
            self._fates.round_ends()
        self._reset()
        self.pilot.round_done(terms.seq)
        for tell in self.on_round:
            tell(terms.seq)

    def _reset(self) -> None:
        self._terms = None
        self._will_sync = None
        self._touched = [False] * len(self.replica.parameters)
        self._left = [len(part.pieces) for part in self.replica.parts]
        self._pushed: set[int] = set()
        self._ready = [None if self.replica.is_on_host(part) else Ready() for part in self.replica.parts]
