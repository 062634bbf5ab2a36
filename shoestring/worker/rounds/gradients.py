"""Steps whose gradients are pushed and whose update happens on the shards.

For `EveryStep`, `Bounded` and `Async`. Each part is pushed as soon as backward has made
all its gradients, while backward goes on with the rest. `step` sends what is left, waits
for the answers its policy asks for, and only there changes parameters. It commits the worker to the
round: before, no shard updates anything, as some gradient may turn out not to be finite.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoestring.codec.base import Vector
from shoestring.errors import UsageError
from shoestring.model.parts import Part, pack_flags
from shoestring.model.vectors import PARAMS, Vectors, pack
from shoestring.wire import messages as say
from shoestring.wire.messages import WHOLE_ROUND
from shoestring.worker.coder import Extra, PartCoder, Terms
from shoestring.worker.protocol.worker import Give, nothing
from shoestring.worker.replica.device import Ready
from shoestring.worker.replica.replica import Replica
from shoestring.worker.rounds.pilot import Pilot
from shoestring.worker.rounds.policy import Async, Bounded, EveryStep
from shoestring.worker.rounds.scale import LossScale, Scaling
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
    scale: LossScale | None  # that is to be taken out of it

    @property
    def device(self) -> torch.device | None:
        return self.replica.device_of(self.part)

    def read(self, memory: Vector | None, feedback: Vector | None) -> tuple[Vector, NDArray[np.bool_]]:
        return self.replica.read_gradient(self.part, memory, feedback, self._factor())

    def gather(self, feedback: Tensor | None) -> tuple[Tensor, NDArray[np.bool_]]:
        return self.replica.gather_gradient(self.part, feedback, self._factor())

    def _factor(self) -> float:
        return 1.0 if self.scale is None else self.scale.inverse


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
        self._commit: say.Commit | None = None  # to the round that was sent
        self._is_committed = False
        self._give: Give = nothing  # what the script has set before it
        self._held: list[Part] = []  # the last part to have its gradients, until the step
        replica.note()
        self._changes = 0  # steps before which the script has changed parameters
        self._sent = SentGradients(replica)
        self._scaling = Scaling()
        self.is_skipped = False  # whether the last step has come to no update
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

    def send(self, *, commits: bool) -> bool:
        """Send what has not been sent; say whether all gradients of the step are finite.

        Commit to the round with the last push, unless `step` is to do so.
        """
        if not self._is_synced:
            raise UsageError(
                "`optimizer.step()` inside `no_sync()`", hint="leave the block before the last backward"
            )
        if self._scaling.scaler is None or self._scaling.is_unscaled:
            self._sent.check()
        else:
            self._sent.accept()  # the scaler has looked at them
        self._scaling.check(has_gradients=any(p.grad is not None for p in self.replica.parameters))
        self._refuse_changed_rates()
        self.replica.refuse_converted()
        terms = self._open()
        changed = self._changed_parts(terms)
        is_loaded = self.state.leave(terms.seq) and (terms.bound == WHOLE_ROUND or self._is_first)
        self.pilot.backward_done()
        commit = self._commit = say.Commit(terms.seq, changed=pack_flags(changed), loads=is_loaded)
        self._give = partial(self._vectors, commit, self._set_values(changed))
        unsent = [part for part in reversed(self.replica.parts) if part.index not in self._sent.parts]
        for part in unsent:
            self._sent.send(part, terms.seq)
        unsent = [*self._held, *unsent]
        for part in unsent[:-1]:
            self._push(part, terms)
        self._push(unsent[-1], terms, commit if commits else None)
        self._is_committed = commits
        self.coder.exchange.wait_sent()
        commit.skip |= not self.coder.is_finite(terms.seq)
        return not commit.skip

    def step(self, *, skip: bool = False) -> bool:
        """Commit to the round that was sent, then wait as the policy says and update the parameters.

        `skip`: gradients that other rounds have sent of the same step are not finite. Says whether the
        step has ended a round.
        """
        terms, commit = self._open(), self._commit
        if commit is None:
            raise ValueError("a step of which nothing was sent")
        if not self._is_committed:
            commit.skip |= skip
            self.coder.exchange.commit(commit, self._give)
        self._close()
        self.is_skipped = commit.skip and terms.bound != WHOLE_ROUND
        self.steps = self._sharing.step = terms.seq
        delay = 0 if terms.save else self._delay(terms.seq)
        for seq in range(self._answered + 1, terms.seq - delay + 1):
            is_whole = self._bound(seq) == WHOLE_ROUND
            self.pilot.hear(self.coder.collect(seq, self.replica, is_whole=is_whole))
            self.is_skipped |= is_whole and self.coder.is_skipped
            self._answered = seq
            self.state.arrived(seq)
        self.replica.note()
        self.pilot.round_done(terms.seq)
        return True

    @contextlib.contextmanager
    def unscaling(self) -> Iterator[None]:
        """Around a scaler's work on the gradients, in place: what was sent stays what was sent."""
        self._sent.check()
        self.coder.exchange.wait_sent()  # pushes are read in another thread
        yield
        self._sent.accept()
        self._scaling.unscaled()

    @contextlib.contextmanager
    def stepping(self, scaler: Any) -> Iterator[None]:
        """Around a scaler's step, which looks at gradients in place first and then steps."""
        self._sent.check()
        self._scaling.scaler = scaler
        try:
            yield
        finally:
            self._scaling.scaler = None

    def shown_round(self) -> int:
        """The round whose state a script sees: the last one pushed, where rounds are those of all workers."""
        return self.steps if self._bound(max(self.steps, 1)) == WHOLE_ROUND else 0

    def _changed_parts(self, terms: Terms) -> NDArray[np.bool_]:
        """The parts whose parameters the script has changed since the last round; raise where it must not."""
        changed = np.zeros(len(self.replica.parts), bool)
        indices = self.replica.changed()
        for index in indices:
            changed[self.replica.parts_of_parameter[index]] = True
        is_late = self._answered < self.steps  # an answer is under way that is for other values
        if indices and (is_late or terms.bound != WHOLE_ROUND):
            raise UsageError(
                f"the script has changed parameter `{self.replica.tensors[indices[0]].name}` since the last "
                "step, and with this policy updates are under way that are for its old value",
                hint='change parameters before `wrap`, or take `policy="every"`; '
                "`model = shoestring.wrap(model)` leaves them to the script",
            )
        self._changes += bool(indices)
        if indices and self._changes == 2:
            self.coder.notice(
                f"the script changes parameters itself (`{self.replica.tensors[indices[0]].name}`): in such "
                "steps they travel to the shards and back uncompressed"
            )
        return changed

    def _set_values(self, changed: NDArray[np.bool_]) -> Mapping[int, Vector]:
        """Copy the parts that the script has changed: where answers are delayed it may change them again."""
        parts = [self.replica.parts[index] for index in np.flatnonzero(changed).tolist()]
        return {part.index: self.replica.read(part) for part in parts}

    def _vectors(
        self, commit: say.Commit, values: Mapping[int, Vector], index: int
    ) -> tuple[tuple[str, ...], memoryview]:
        """What the script has set of a part before a round, as its commit says."""
        vectors: Vectors = {PARAMS: values[index]} if index in values else {}
        if commit.loads:
            vectors |= self.state.give(commit.seq, self.replica.parts[index])
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
                self._gradients_are_there(self.replica.parts[part], self._open())

        return is_ready

    def _open(self) -> Terms:
        """The terms of the round that is being pushed."""
        if self._terms is None:
            bound = self._bound(self.steps + 1)
            terms = self.pilot.terms(self.steps + 1, self._hyper(), self._sharing.weigh(), bound)
            self._terms = replace(terms, early=True)
            self._scaling.begin()
        return self._terms

    def _gradients_are_there(self, part: Part, terms: Terms) -> None:
        """Push a part during backward; the last one goes with the step, to carry the commit."""
        self._sent.send(part, terms.seq)
        if len(self._sent.parts) == len(self.replica.parts):
            self._held.append(part)
        else:
            self._push(part, terms)

    def _push(self, part: Part, terms: Terms, commit: say.Commit | None = None) -> None:
        ready = self._ready[part.index]
        if ready is not None:
            ready.note(self.replica.of(part))
            ready.close()
        is_checked = terms.bound == WHOLE_ROUND and part.index == terms.seq % len(self.replica.parts)
        checksums = partial(self.replica.checksums, part) if is_checked else bytes
        source = PartGradient(self.replica, part, ready, self._scaling.scale)
        self.coder.push(part, terms, source, Extra(checksums, commit, self._give if commit else nothing))

    def _close(self) -> None:
        self._terms = self._commit = None
        self._held.clear()
        self._sent.clear()
        self._scaling.end()
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
