"""Local steps: the worker's own optimizer runs, then workers exchange what their parameters moved by.

The anchor is what all workers agreed on last, in float32. A round pushes `parameters - anchor`; the
answer moves the anchor, on every worker by the same bits, and its parameters are the anchor
until it trains on. Then what the worker has not sent yet is added to them, as it was learned
here and the others do not know it: with coarse codes that is worth more than a finer step.
Less precise parameters are the anchor rounded, and what is pushed is how far they moved from there:
so small moves add up in the anchor, though the parameters cannot hold them. The local optimizer keeps
its state. An anchor lies where its parameters were when the worker joined, on a GPU too: so nothing but
what is pushed crosses to the host.

With a delay training goes on while a round is under way. When its answer is applied, what the parameters
have moved by since the round began is added to the anchor: `anchor + (parameters - parameters then)`.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoestring.codec.base import Vector
from shoestring.errors import UsageError
from shoestring.model.parts import Part
from shoestring.wire.messages import WHOLE_ROUND
from shoestring.worker.coder import PartCoder, Setting, Terms
from shoestring.worker.replica.device import Ready, common_device
from shoestring.worker.replica.replica import Replica
from shoestring.worker.replica.rounding import rounded
from shoestring.worker.rounds.pilot import Pilot
from shoestring.worker.rounds.policy import LocalSteps
from shoestring.worker.rounds.sharing import Sharing


class Anchors:
    """What all workers agreed on last, part by part."""

    def __init__(self, replica: Replica, agreed: Mapping[int, Vector]) -> None:
        """`agreed` are the values of parts of which the replica holds less, as they came from the shards."""
        self.values = []
        for part in replica.parts:
            device = replica.device_of(part)
            if part.index in agreed:
                self.values.append(torch.from_numpy(agreed[part.index]).to(device or "cpu"))
            elif device is None:
                self.values.append(torch.from_numpy(replica.read(part)))
            else:
                self.values.append(replica.gather(part))

    def device_of(self, part: Part) -> torch.device | None:
        return common_device([self.values[part.index]])

    def expect(self, part: Part, used: bytes) -> None:
        """Nothing to do: every parameter moves."""

    def write(self, part: Part, values: Vector) -> None:
        own = self.values[part.index]
        if own.device.type == "cpu":  # past torch, which warns of memory that it may not write to
            own.numpy()[:] = values
        else:
            own.copy_(torch.from_numpy(values))

    @contextlib.contextmanager
    def on_host(self, part: Part) -> Iterator[Vector]:
        own = self.values[part.index]
        copy = own.cpu()  # itself, if it is there already
        yield copy.numpy()
        if copy is not own:
            own.copy_(copy)

    @contextlib.contextmanager
    def on_device(self, part: Part) -> Iterator[Tensor]:
        yield self.values[part.index]


@dataclass(frozen=True)
class PartDifference:
    """How far the parameters of one part have moved from the anchor, to be pushed."""

    replica: Replica
    part: Part
    anchor: Tensor
    ready: Ready
    then: Tensor | None  # a copy of the parameters when the round began; none: they do not change meanwhile

    @property
    def device(self) -> torch.device | None:
        own = self.replica.of(self.part) if self.then is None else [self.then]
        return common_device([*own, self.anchor])

    def read(self, memory: Vector | None, feedback: Vector | None) -> tuple[Vector, NDArray[np.bool_]]:
        if self.device is not None:  # only the difference crosses
            moved, _ = self.gather(None)
            values: Vector = np.empty(self.part.size, np.float32) if memory is None else memory
            torch.from_numpy(values).copy_(moved)
        elif self.then is not None:
            values = np.subtract(self.then.cpu().numpy(), self._start().cpu().numpy(), out=memory)
        else:
            values = self.replica.read(self.part, memory)
            values -= self._start().cpu().numpy()
        if feedback is not None:
            values += feedback
        return values, self._used()

    def gather(self, feedback: Tensor | None) -> tuple[Tensor, NDArray[np.bool_]]:
        now = self.replica.gather(self.part) if self.then is None else self.then.clone()
        values = now.sub_(self._start())
        return (values if feedback is None else values.add_(feedback)), self._used()

    def _start(self) -> Tensor:
        """What the parameters were when the last round had ended."""
        return rounded(self.anchor, self.replica.precisions[self.part.index])

    def _used(self) -> NDArray[np.bool_]:
        return np.ones(len(self.part.pieces), bool)


class DifferenceRounds:
    """Turns every `h` local steps into a round."""

    state = None  # the optimizer's is on the worker
    is_skipped = False

    def __init__(
        self,
        replica: Replica,
        coder: PartCoder,
        policy: LocalSteps,
        pilot: Pilot,
        *,
        inner: torch.optim.Optimizer,
        first_round: int,
        sharing: Sharing,
        agreed: Mapping[int, Vector] = MappingProxyType({}),
        before: int = 0,
    ) -> None:
        """`before`: how many steps were taken with another policy."""
        self.replica = replica
        self.coder = coder
        self.policy = policy
        self.pilot = pilot
        self.inner = inner
        self._groups = len(inner.param_groups)  # that the shards know of
        self._sharing = sharing
        self.rounds = first_round - 1
        self._before = before
        self.steps = sharing.step = before + self._first_step(first_round)
        self.anchors = Anchors(replica, agreed)
        self.closure: Callable[[], Any] | None = None  # that the script gives with the next step
        self.loss: Any = None  # that it came to
        self._has_gone_on = False
        self._is_set = False  # the script has changed parameters since the last round
        self._then: list[Tensor] | None = None  # the parameters when the round under way began
        self._terms: Terms | None = None  # of the round under way
        self._is_answered = True  # the anchors are as after the last round that began
        self._shows_agreed = False
        replica.note()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Nothing to do: gradients are never sent."""
        yield

    def unscaling(self) -> contextlib.AbstractContextManager[None]:
        """Nothing to do: gradients are never sent."""
        return contextlib.nullcontext()

    def stepping(self, scaler: Any) -> contextlib.AbstractContextManager[None]:
        """Nothing to do, likewise."""
        return contextlib.nullcontext()

    def check_groups(self) -> None:
        """Nothing to do: the optimizer runs here, whatever its groups say."""

    def forward_begins(self) -> None:
        """Before the first training pass after a round, go on from what this worker has learned."""
        self.go_on()

    def go_on(self) -> None:
        """Before the first forward pass after a round: add what this worker has not sent yet."""
        if self._has_gone_on or self._terms is not None or self._shows_agreed:
            return
        self._look()
        # Where shares change, feedback counts by the share it was made with, not the next one.
        if not self._sharing.is_auto:
            for part in self.replica.parts:
                self.coder.lend(part, self.replica)
        self.replica.note()
        self._has_gone_on = True

    def _look(self) -> None:
        """Take note if the script has changed parameters, as a `load_state_dict` does.

        Then the next round is exchanged without loss, and nothing is added to what the script has set.
        """
        changed = self.replica.changed()
        if changed and self.policy.outer == "nesterov":
            raise UsageError(
                f"the script has changed parameter `{self.replica.tensors[changed[0]].name}` since the last "
                'step, which `outer="nesterov"` would take for a step to be gone further',
                hint='change parameters before `wrap`, or take `outer="average"`',
            )
        if changed:
            self._hear()  # the answer under way is for what was there before: it moves the anchors alone
            self._terms = self._then = None
            self._is_set = True
            self.coder.forget()
            self.replica.note()

    def send(self, *, commits: bool) -> bool:
        """Nothing to do: gradients are never sent."""
        return True

    def step(self, *, skip: bool = False) -> bool:
        """Take a local step; after every `h` of them, a round. Says whether there was one."""
        if self._shows_agreed:
            raise UsageError("a step within `optimizer.agreed()`", hint="evaluate or save there, no more")
        self.replica.refuse_converted()
        self._look()
        self.loss = None
        if not skip:
            self.loss = self.inner.step() if self.closure is None else self.inner.step(self.closure)
        self.replica.note()
        self.steps += 1
        self._sharing.step = self.steps
        since, h = self.steps - self._before - self.policy.warmup, self.policy.h
        if self._terms is not None and (since - self.policy.delay) % h == 0:
            self._end()
        if since <= 0 or since % h == 0:
            self._begin(has_delay=self.policy.delay > 0 and since > 0)
            return True
        self.coder.statistics.next_step()
        return False

    @contextlib.contextmanager
    def agreed(self) -> Iterator[None]:
        """Within, parameters are what all workers agreed on last, the same bits on all; then as before."""
        self._look()
        self._hear()
        own = [self._copy(part) for part in self.replica.parts]
        self._write(self.anchors.values)
        self._shows_agreed = True
        try:
            yield
            if changed := self.replica.changed():
                raise UsageError(
                    f"parameter `{self.replica.tensors[changed[0]].name}` was changed within "
                    "`optimizer.agreed()`, which puts back what it was",
                    hint="change parameters outside of it",
                )
        finally:
            self._shows_agreed = False
            self._write(own)

    def _begin(self, *, has_delay: bool) -> None:
        """Push what the parameters have moved by; without a delay, end the round as well."""
        outer = [self.policy.lr, self.policy.momentum] if self.policy.outer == "nesterov" else []
        terms = self.pilot.terms(self.rounds + 1, [outer] * self._groups, self._sharing.weigh(), WHOLE_ROUND)
        terms = replace(terms, skip=not self.replica.is_finite())  # of all parts, before the first is sent
        if self._is_set:
            terms = replace(terms, setting=Setting())
        self._then = [self._copy(part) for part in self.replica.parts] if has_delay else None
        if not has_delay:
            self.pilot.backward_done()
        for part in reversed(self.replica.parts):
            anchor, ready = self.anchors.values[part.index], Ready()
            then = None if self._then is None else self._then[part.index]
            ready.note([*self.replica.of(part), anchor])
            ready.close()
            self.coder.push(part, terms, PartDifference(self.replica, part, anchor, ready, then))
        self._terms, self._is_answered, self._is_set = terms, False, False
        self.rounds = terms.seq
        if not has_delay or terms.save:  # a checkpoint holds what all agreed on
            self._end()

    def _hear(self) -> None:
        """Wait for the answer of the round under way, if there is one, and move the anchors."""
        if self._terms is None or self._is_answered:
            return
        if self._then is not None:
            self.pilot.backward_done()
        self.coder.exchange.wait_sent()
        self.pilot.hear(self.coder.collect(self._terms.seq, self.anchors))
        self._is_answered = True
        self.pilot.round_done(self._terms.seq)

    def _end(self) -> None:
        """Bring the parameters to what was agreed on, and what they have moved by since the round began."""
        self._hear()
        is_lost = self._terms is not None and self._terms.skip  # this worker's are not finite
        if self._then is None or is_lost:
            self._write(self.anchors.values)
        else:
            pairs = zip(self.replica.parts, self._then, self.anchors.values, strict=True)
            self._write([self._copy(part).sub_(then).add_(anchor) for part, then, anchor in pairs])
        self._terms = self._then = None
        self._has_gone_on = False

    def _copy(self, part: Part) -> Tensor:
        """The parameters of a part in float32, on the device where they lie."""
        if self.replica.device_of(part) is None:
            return torch.from_numpy(self.replica.read(part))
        return self.replica.gather(part)

    def _write(self, values: Sequence[Tensor]) -> None:
        for part, own in zip(self.replica.parts, values, strict=True):
            self.replica.write(part, own)
        self.replica.note()

    def _first_step(self, first_round: int) -> int:
        done = first_round - 1
        warmup = self.policy.warmup
        return done if done <= warmup else warmup + (done - warmup) * self.policy.h
