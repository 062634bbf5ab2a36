"""Steps whose gradients are pushed and whose update happens on the shards.

For `EveryStep`, `Bounded` and `Async`. Each part is pushed as soon as backward has made
all its gradients, while backward goes on with the rest. `step` sends what is left, waits
for the answers its policy asks for, and only there changes parameters. It commits the worker to the
round: before, no shard updates anything, as some gradient may turn out not to be finite.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoestring.codec.base import Vector
from shoestring.errors import UsageError
from shoestring.model.parts import Part, is_flagged
from shoestring.model.vectors import PARAMS, Vectors, pack
from shoestring.wire import messages as say
from shoestring.wire.messages import WHOLE_ROUND
from shoestring.worker.coder import PartCoder, Terms
from shoestring.worker.replica.device import Ready
from shoestring.worker.replica.replica import Replica
from shoestring.worker.rounds.pilot import Pilot
from shoestring.worker.rounds.policy import Async, Bounded, EveryStep
from shoestring.worker.rounds.sent import SentGradients
from shoestring.worker.rounds.sharing import Sharing
from shoestring.worker.rounds.state import ShardState

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
        state: ShardState,
        is_first: bool,
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
        self.state = state
        self._is_first = is_first
        self._is_synced = True
        self._answered = first_round - 1  # the last round whose answers were applied
        self._terms: Terms | None = None
        self._sent = SentGradients(replica)
        self._ready = self._fresh()
        self._hooks: list[Any] = []
        for index, parameter in enumerate(replica.parameters):
            hooked: Any = parameter
            self._hooks.append(hooked.register_post_accumulate_grad_hook(self._hook(index)))

    def close(self) -> None:
        """Watch gradients no longer."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

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

    def check_groups(self) -> None:
        """Raise unless the shards can do what the optimizer's groups say."""
        self._hyper()

    def step(self) -> bool:
        """Send what has not been sent, then wait as the policy says and update the parameters."""
        if not self._is_synced:
            raise UsageError(
                "`optimizer.step()` inside `no_sync()`", hint="leave the block before the last backward"
            )
        self._sent.check()
        self._refuse_changed_rates()
        terms = self._open()
        is_loaded = self.state.leave(terms.seq) and (terms.bound == WHOLE_ROUND or self._is_first)
        self.pilot.backward_done()
        for part in reversed(self.replica.parts):
            if part.index not in self._sent.parts:
                self._push(part, terms)
        self.coder.exchange.wait_sent()
        commit = say.Commit(terms.seq, skip=not self.coder.is_finite(terms.seq), loads=is_loaded)
        self.coder.exchange.commit(commit, partial(self._give, commit))
        self._close()
        self.steps = self._sharing.step = terms.seq
        delay = 0 if terms.save else self._delay(terms.seq)
        for seq in range(self._answered + 1, terms.seq - delay + 1):
            is_whole = self._bound(seq) == WHOLE_ROUND
            self.pilot.hear(self.coder.collect(seq, self.replica, is_whole=is_whole))
            self._answered = seq
            self.state.arrived(seq)
        self.pilot.round_done(terms.seq)
        return True

    def shown_round(self) -> int:
        """The round whose state a script sees: the last one pushed, where rounds are those of all workers."""
        return self.steps if self._bound(max(self.steps, 1)) == WHOLE_ROUND else 0

    def _give(self, commit: say.Commit, index: int) -> tuple[tuple[str, ...], memoryview]:
        """What the script has set of a part before a round, as its commit says."""
        part = self.replica.parts[index]
        vectors: Vectors = {}
        if is_flagged(commit.changed, index):
            vectors[PARAMS] = self.replica.read(part)
        if commit.loads:
            vectors |= self.state.give(commit.seq, part)
        return tuple(vectors), pack(vectors)

    def _hook(self, index: int) -> Callable[[torch.Tensor], None]:
        parts = self.replica.parts_of_parameter[index]

        def is_ready(parameter: torch.Tensor) -> None:
            if not self._is_synced:
                return
            whole = self._sent.arrive(index)
            for part in parts:
                ready = self._ready[part]
                if ready is not None:
                    ready.note([parameter])
            for part in whole:
                self._push(self.replica.parts[part], self._open())

        return is_ready

    def _open(self) -> Terms:
        """The terms of the round that is being pushed."""
        if self._terms is None:
            bound = self._bound(self.steps + 1)
            terms = self.pilot.terms(self.steps + 1, self._hyper(), self._sharing.weigh(), bound)
            self._terms = replace(terms, early=True)
        return self._terms

    def _push(self, part: Part, terms: Terms) -> None:
        self._sent.send(part, terms.seq)
        ready = self._ready[part.index]
        if ready is not None:
            ready.note(self.replica.of(part))
            ready.close()
        self.coder.push(part, terms, PartGradient(self.replica, part, ready))

    def _close(self) -> None:
        self._terms = None
        self._sent.clear()
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

    def _refuse_changed_rates(self) -> None:
        """Raise if a learning rate, or what else goes with gradients, is not what was sent with them."""
        if self._terms is not None and self._terms.hyper != self._hyper():
            raise UsageError(
                "a learning rate or another setting of the optimizer was changed between `backward()`, "
                "which sent it with the gradients, and `optimizer.step()`",
                hint="change it after `optimizer.step()`, or before `backward()`",
            )
