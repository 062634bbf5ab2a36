"""Steps whose gradients are pushed and whose update happens on the shards.

For `EveryStep`, `Bounded` and `Async`. Each part is pushed as soon as backward has made
all its gradients, while backward goes on with the rest. `step` sends what is left, waits
for the answers its policy asks for, and only there changes parameters. It commits the worker to the
round: before, no shard updates anything, as some gradient may turn out not to be finite.

What a script does to gradients that have left (clips them, adds to them, drops them) would not reach the
shards, so it is refused, with the line to write instead.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoestring.codec.base import Vector
from shoestring.errors import UsageError
from shoestring.model.parts import Part
from shoestring.wire import messages as say
from shoestring.wire.messages import WHOLE_ROUND
from shoestring.worker.coder import Extra, PartCoder, Terms
from shoestring.worker.protocol.worker import Give, nothing
from shoestring.worker.replica.device import Ready
from shoestring.worker.replica.replica import Replica
from shoestring.worker.rounds.changes import Changes
from shoestring.worker.rounds.pilot import Pilot
from shoestring.worker.rounds.policy import Async, Bounded, EveryStep
from shoestring.worker.rounds.scale import LossScale, Scaling, versions_of_a_look
from shoestring.worker.rounds.sharing import Sharing
from shoestring.worker.rounds.state import ShardState

NO_BOUND = 1 << 30
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes a value
_MEAN = "`model = shoestring.wrap(model)`"


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


class SentGradients:
    """Follows the gradients of one round, from their backward pass to the step.

    It knows which parts are whole, and what was sent. A later change shows in the gradient's object or its
    version; of changes that bypass versions (`.grad.data`) those of one part in turn show in a sum over its
    bits. Used by the threads of backward and of the script.
    """

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
        self._is_synced = True
        self._answered = first_round - 1  # the last round whose answers were applied
        self._terms: Terms | None = None
        self._commit: say.Commit | None = None  # to the round that was sent
        self._is_committed = False
        self._give: Give = nothing  # what the script has set before it
        self._held: list[Part] = []  # the last part to have its gradients, until the step
        self._changes = Changes(replica, state, coder.notice, is_first=is_first)
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
        self.pilot.backward_done()
        is_late = self._answered < self.steps
        commit, self._give = self._changes.commit(terms, is_late=is_late)
        self._commit = commit
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


def _sum_of_bits(gradient: Tensor) -> Tensor:
    return gradient.detach().view(_BITS[gradient.element_size()]).sum()
