"""Steps whose gradients are pushed and whose update happens on the shards.

For `EveryStep`, `Bounded` and `Async`. Each part is pushed as soon as backward has made
all its gradients, while backward goes on with the rest. `step` sends what is left, waits
for the answers its policy asks for, and only there changes parameters.
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
from shoestring.model.parts import Part
from shoestring.wire.messages import WHOLE_ROUND
from shoestring.worker.coder import PartCoder, Terms
from shoestring.worker.device import Ready
from shoestring.worker.replica import Replica
from shoestring.worker.rounds.pilot import Pilot
from shoestring.worker.rounds.policy import Async, Bounded, EveryStep
from shoestring.worker.rounds.sharing import Sharing

NO_BOUND = 1 << 30


@dataclass(frozen=True)
class PartGradient:
    """The gradient of one part, to be pushed."""

    replica: Replica
    part: Part
    ready: Ready | None

    @property
    def device(self) -> torch.device | None:
        return self.replica.device_of(self.part)

    def read(self, memory: Vector | None, feedback: Vector | None) -> tuple[Vector, NDArray[np.bool_]]:
        return self.replica.read_gradient(self.part, memory, feedback)

    def gather(self, feedback: Tensor | None) -> tuple[Tensor, NDArray[np.bool_]]:
        return self.replica.gather_gradient(self.part, feedback)


class GradientRounds:
    """Turns backward passes and steps into rounds."""

    def __init__(
        self,
        replica: Replica,
        coder: PartCoder,
        policy: EveryStep | Bounded | Async,
        pilot: Pilot,
        *,
        hyper: Callable[[], list[list[float]]],
        first_round: int,
        sharing: Sharing,
    ) -> None:
        self.replica = replica
        self.coder = coder
        self.policy = policy
        self.pilot = pilot
        self.steps = sharing.step = first_round - 1
        self._sharing = sharing
        self._hyper = hyper
        self._is_synced = True
        self._answered = first_round - 1  # the last round whose answers were applied
        self._terms: Terms | None = None
        self._left = [len(part.pieces) for part in replica.parts]  # gradients a part still waits for
        self._ready = self._fresh()
        self._pushed: set[int] = set()
        self._versions: dict[int, int] = {}  # of each gradient when it was pushed
        for index, parameter in enumerate(replica.parameters):
            register: Any = parameter.register_post_accumulate_grad_hook
            register(self._hook(index))

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backward passes add up gradients without sending them."""
        before, self._is_synced = self._is_synced, False
        try:
            yield
        finally:
            self._is_synced = before

    def forward_begins(self) -> None:
        """Nothing to do: gradients say what is sent."""

    @property
    def rounds(self) -> int:
        """The last round that was pushed: here every step is one."""
        return self.steps

    def step(self) -> bool:
        """Send what has not been sent, then wait as the policy says and update the parameters."""
        if not self._is_synced:
            raise UsageError(
                "`optimizer.step()` inside `no_sync()`", hint="leave the block before the last backward"
            )
        self._refuse_changed_gradients()
        terms = self._open()
        self.pilot.backward_done()
        for part in reversed(self.replica.parts):
            if part.index not in self._pushed:
                self._push(part, terms)
        self.coder.exchange.wait_sent()
        self._close()
        self.steps = self._sharing.step = terms.seq
        delay = 0 if terms.save else self._delay(terms.seq)
        for seq in range(self._answered + 1, terms.seq - delay + 1):
            is_whole = self._bound(seq) == WHOLE_ROUND
            self.pilot.hear(self.coder.collect(seq, self.replica, is_whole=is_whole))
            self._answered = seq
        self.pilot.round_done(terms.seq)
        return True

    def _hook(self, index: int) -> Callable[[torch.Tensor], None]:
        parts = self.replica.parts_of_parameter[index]

        def is_ready(parameter: torch.Tensor) -> None:
            if not self._is_synced:
                return
            terms = self._open()
            if any(part in self._pushed for part in parts):
                raise UsageError(
                    f"a second backward pass changed the gradient of `{self.replica.tensors[index].name}`, "
                    "which is on its way already",
                    hint="put all but the last backward pass of a step into `with model.no_sync():`",
                )
            for part in parts:
                ready = self._ready[part]
                if ready is not None:
                    ready.note([parameter])
                self._left[part] -= 1
                if self._left[part] == 0:
                    self._push(self.replica.parts[part], terms)

        return is_ready

    def _open(self) -> Terms:
        """The terms of the round that is being pushed."""
        if self._terms is None:
            self._terms = self.pilot.terms(
                self.steps + 1, self._hyper(), self._sharing.weigh(), self._bound(self.steps + 1)
            )
        return self._terms

    def _push(self, part: Part, terms: Terms) -> None:
        self._pushed.add(part.index)
        for piece in part.pieces:
            gradient = self.replica.parameters[piece.tensor].grad
            self._versions[piece.tensor] = -1 if gradient is None else gradient._version
        ready = self._ready[part.index]
        if ready is not None:
            ready.note(self.replica.of(part))
            ready.close()
        self.coder.push(part, terms, PartGradient(self.replica, part, ready))

    def _close(self) -> None:
        self._terms = None
        self._pushed.clear()
        self._versions.clear()
        self._left = [len(part.pieces) for part in self.replica.parts]
        self._ready = self._fresh()

    def _fresh(self) -> list[Ready | None]:
        """For each part, when its gradients on GPUs are there; none where all of it is on the host."""
        return [None if self.replica.is_on_host(part) else Ready() for part in self.replica.parts]

    def _bound(self, seq: int) -> int:
        if seq <= self.policy.warmup or isinstance(self.policy, EveryStep):
            return WHOLE_ROUND
        if isinstance(self.policy, Bounded):  # one step is taken before the answer is waited for
            return max(0, self.policy.staleness - 1)
        return NO_BOUND

    def _delay(self, seq: int) -> int:
        if seq <= self.policy.warmup:
            return 0
        if isinstance(self.policy, EveryStep):
            return self.pilot.delay(seq)
        return 0 if isinstance(self.policy, Bounded) and self.policy.staleness == 0 else 1

    def _refuse_changed_gradients(self) -> None:
        for index, version in self._versions.items():
            gradient = self.replica.parameters[index].grad
            if version != (-1 if gradient is None else gradient._version):
                raise UsageError(
                    f"the gradient of `{self.replica.tensors[index].name}` was changed after it was sent",
                    hint="clip with `wrap(..., clip_norm=...)`, or give `overlap=False` to send at `step()`",
                )
