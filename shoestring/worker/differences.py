"""Local steps: the worker's own optimizer runs, then workers exchange what their parameters moved by.

The anchor is what all workers agreed on last. A round pushes `parameters - anchor`; the
answer moves the anchor, on every worker by the same bits, and training goes on from it.
The local optimizer keeps its state.
"""

import contextlib
from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from shoestring.codec.base import Vector
from shoestring.server.partition import Part
from shoestring.wire.messages import WHOLE_ROUND
from shoestring.worker.courier import Courier
from shoestring.worker.pilot import Pilot
from shoestring.worker.policy import LocalSteps
from shoestring.worker.replica import Replica
from shoestring.worker.sharing import Sharing


class DifferenceRounds:
    """Turns every `h` local steps into a round."""

    def __init__(
        self,
        replica: Replica,
        courier: Courier,
        policy: LocalSteps,
        pilot: Pilot,
        *,
        inner: torch.optim.Optimizer,
        first_round: int,
        sharing: Sharing,
    ) -> None:
        self.replica = replica
        self.courier = courier
        self.policy = policy
        self.pilot = pilot
        self.inner = inner
        self._sharing = sharing
        self.rounds = first_round - 1
        self.steps = sharing.step = self._first_step(first_round)
        self.anchors = [replica.read(part) for part in replica.parts]

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Nothing to do: gradients are never sent."""
        yield

    def step(self) -> bool:
        """Take a local step; after every `h` of them, a round. Says whether there was one."""
        self.inner.step()
        self.steps += 1
        self._sharing.step = self.steps
        if self.steps <= self.policy.warmup or (self.steps - self.policy.warmup) % self.policy.h == 0:
            self.pilot.backward_done()
            self._exchange()
            return True
        self.courier.statistics.next_step()
        return False

    def _exchange(self) -> None:
        hyper = [[self.policy.lr, self.policy.momentum]] if self.policy.outer == "nesterov" else [[]]
        terms = self.pilot.terms(self.rounds + 1, hyper, self._sharing.weigh(), WHOLE_ROUND)
        for part in self.replica.parts:
            self.courier.push(part, terms, partial(self._difference, part))
        self.courier.exchange.wait_sent()
        self.pilot.hear(self.courier.collect(terms.seq, self._apply, lambda part: self.anchors[part.index]))
        self.rounds = terms.seq
        for part, anchor in zip(self.replica.parts, self.anchors, strict=True):
            self.replica.write(part, anchor)
        self.pilot.round_done(terms.seq)

    def _difference(
        self, part: Part, memory: Vector | None, kept: Vector | None
    ) -> tuple[Vector, NDArray[np.bool_]]:
        values = self.replica.read(part, memory)
        values -= self.anchors[part.index]
        if kept is not None:
            values += kept
        return values, np.ones(len(part.pieces), bool)

    def _apply(self, part: Part, values: Vector, is_full: bool) -> None:
        self.anchors[part.index][:] = values  # changes are added there at once

    def _first_step(self, first_round: int) -> int:
        done = first_round - 1
        warmup = self.policy.warmup
        return done if done <= warmup else warmup + (done - warmup) * self.policy.h
