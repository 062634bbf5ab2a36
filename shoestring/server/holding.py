"""One part as a shard holds it: parameters, optimizer state, and what the workers lack.

`params` is bit for bit what every up-to-date worker holds. With a lossy reply the update
is added to `feedback`; what the codec sends of it is added to `params` here and at the
workers by the same exact decoder, and the rest stays in `feedback`. With a lossless reply
(`float32`) `feedback` is folded into `params` and the workers get `params` itself.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoestring.codec.base import Codec, Payload, Vector
from shoestring.codec.registry import LOSSLESS, codec_of
from shoestring.compiled.scratch import room
from shoestring.errors import NonFiniteError, StreamError, WireError
from shoestring.model.layers import Layer
from shoestring.model.parts import Part
from shoestring.model.rules import Rule
from shoestring.model.statistics import History, unpack
from shoestring.model.vectors import PARAMS, STEPS, pack
from shoestring.server import rules
from shoestring.wire.messages import DISCARDED, WIDE, Decisions, Push

HYPER_LIMIT = 1e18  # what rules make of such numbers is still a float32


@dataclass(frozen=True)
class Reply:
    """What brings workers from `version - 1` to `version`. `codec` empty: nothing changed."""

    version: int
    seq: int
    codec: str
    is_full: bool
    payload: Payload
    squares: float = 0.0  # of the mean gradient, where it is clipped
    slot: int = -1  # where in the shard's shared memory the payload is, if it is
    statistics: bytes = b""  # of the part's layers, as of this version
    decisions: Decisions | None = None  # the first worker's, and all workers' paces
    used: bytes = b""  # of a mean: the pieces that had a gradient on any worker; empty: all
    news: bytes = b""  # from the first worker to all others
    skip: bool = False  # a worker's gradient was not finite

    @property
    def size_bytes(self) -> int:
        return self.payload.nbytes + len(self.statistics) + len(self.news)


class Holding:
    """The values of one part. Not thread-safe: one round at a time works on it."""

    is_mean = False  # whether answers are mean gradients, whatever they hold

    def __init__(self, part: Part, rule: Rule, groups: Sequence[int], layers: Sequence[Layer] = ()) -> None:
        self.part = part
        self.rule = rule
        self.groups = tuple(groups)  # of each piece
        self.params: Vector = np.zeros(part.size, np.float32)
        self.state = {name: np.zeros(part.size, np.float32) for name in rule.state_names}
        self.feedback: Vector | None = None
        self.steps = np.zeros(len(part.pieces), np.int64)  # updates of each piece so far
        self.version = 0
        self.has_values = False  # whether a worker has brought the parameters
        self.history = History(layers)
        self.names: Sequence[str] = ()  # of the tensor of each piece
        self.slots: tuple[Vector, ...] = ()  # shared memory to put the whole part into

    @property
    def values(self) -> Vector:
        """What every up-to-date worker holds, bit for bit."""
        return self.params

    @property
    def has_feedback(self) -> bool:
        """Whether workers lack something that they are to be sent yet."""
        return self.feedback is not None

    def begin_feedback(self) -> None:
        """Make room for feedback, to be filled from a checkpoint."""
        self.feedback = np.zeros_like(self.params)

    def check(self, push: Push, payload: memoryview) -> None:
        """Raise unless an update can work with a push, whatever else it finds in the payload.

        So what is wrong with a push is said to the worker that sent it, and an update that has
        begun can fail only for the bytes of one contribution, before anything has changed.
        """
        if len(push.used) not in (0, (len(self.part.pieces) + 7) // 8):
            raise self._misfit("the map of used pieces has the wrong length")
        if len(push.hyper) <= max(self.groups) or not all(self._fits(group) for group in push.hyper):
            raise self._misfit("the hyperparameters do not fit the rule")
        if len(push.checksums) not in (0, 4 * len(self.part.pieces)):
            raise self._misfit("there is not one checksum a piece")
        if push.statistics:
            unpack(push.statistics, self.history.layers)
        most = self.params.nbytes
        if push.codec == WIDE and self.is_mean:
            most *= 2
        elif push.codec not in (LOSSLESS, ""):
            most = codec_of(push.codec).max_bytes(self.part.layout)
        if push.reply != LOSSLESS:
            codec_of(push.reply)
        if push.skip or not push.codec:
            most = 0
        if push.fates and not self._are_fates(push.fates):
            raise self._misfit("it does not say what became of each piece")
        is_plain = push.codec in (LOSSLESS, WIDE)
        if payload.nbytes > most or (is_plain and payload.nbytes != most):
            raise StreamError(
                f"{payload.nbytes} bytes of `{push.codec}` for part {push.part}, the most is {most}",
                hint="check both sides' versions",
            )

    def _fits(self, values: Sequence[float]) -> bool:
        """Say whether the rule can work with these hyperparameters: it must not find out in mid-update."""
        names = self.rule.hyper_names
        return len(values) == len(names) and all(
            abs(value) <= HYPER_LIMIT
            and (not name.startswith("beta") or 0 <= value < 1)
            and (name != "momentum" or value == 0 or "momentum" in self.state)
            for name, value in zip(names, values, strict=True)
        )

    def _are_fates(self, fates: bytes) -> bool:
        return self.is_mean and len(fates) == len(self.part.pieces) and max(fates) <= DISCARDED

    def _misfit(self, problem: str) -> WireError:
        return WireError(f"bad push of part {self.part.index}: {problem}", hint="check both sides' versions")

    def advance(
        self,
        gradient: Vector,
        *,
        scale: float,
        hyper: Sequence[Sequence[float]],
        used: NDArray[np.bool_],
        codec: str,
        seq: int,
        slot: int = -1,
        fates: bytes = b"",
    ) -> Reply:
        """Apply the rule to a summed gradient (used up as scratch) and say how workers follow."""
        lossless = codec == LOSSLESS
        if lossless and self.feedback is not None:
            self.params += self.feedback
            self.feedback = None
        self._update(rules.apply if lossless else rules.update, gradient, scale, hyper, used)
        self.version += 1
        if lossless:
            return self.full(seq, slot)
        for start, stop in self._unused(used):
            gradient[start:stop] = 0
        return self._send(gradient, codec_of(codec), seq)

    def put(self, vectors: Mapping[str, NDArray[Any]]) -> None:
        """Take over parameters, optimizer state or both, as a worker has set them.

        What workers lack of the updates of a parameter is forgotten where it is set to another value.
        """
        for name, vector in vectors.items():
            if name == PARAMS:
                self._forget_feedback(vector)
                self.params[:] = vector
            elif name == STEPS:
                self.steps[:] = vector
            else:
                self.state[name][:] = vector

    def optimizer_state(self) -> memoryview:
        """Copy all that the rule keeps, as a payload."""
        return pack({STEPS: self.steps, **self.state})

    def _forget_feedback(self, params: Vector) -> None:
        if self.feedback is not None:
            for start, stop in pairwise(self.part.layout.offsets):
                if self.params[start:stop].tobytes() != params[start:stop].tobytes():
                    self.feedback[start:stop] = 0

    def hold(self, seq: int) -> Reply:
        """Count a round that is skipped: it changes nothing."""
        self.version += 1
        return Reply(self.version, seq, "", False, np.empty(0, np.uint8), skip=True)

    def full(self, seq: int, slot: int = -1) -> Reply:
        """Return the whole part as it is now, in a slot or in memory of its own."""
        if slot < 0:
            return Reply(self.version, seq, LOSSLESS, True, self.params.copy().view(np.uint8))
        self.slots[slot][:] = self.params
        return Reply(self.version, seq, LOSSLESS, True, self.slots[slot].view(np.uint8), slot=slot)

    def _update(
        self,
        change: Callable[..., None],
        gradient: Vector,
        scale: float,
        hyper: Sequence[Sequence[float]],
        used: NDArray[np.bool_],
    ) -> None:
        """Let the rule change the pieces that are used, or `gradient` to what is to be added to them."""
        self.steps[used] += 1
        for start, stop, group, step in self._runs(used):
            state = {name: vector[start:stop] for name, vector in self.state.items()}
            change(self.rule, hyper[group], self.params[start:stop], gradient[start:stop], state, step, scale)

    def _send(self, update: Vector, codec: Codec, seq: int) -> Reply:
        layout = self.part.layout
        if self.feedback is not None:
            update += self.feedback
        left_over = None
        if self.rule.keeps:
            left_over = room("holding_left_over", update.size, np.float32)[: update.size]
        try:
            payload = codec.encode(update, layout, left_over)
        except NonFiniteError as error:
            raise self._overflow(seq) from error
        codec.decode(payload, layout, self.params, 1.0)
        if left_over is not None:
            if self.feedback is None:
                self.feedback = np.empty_like(update)
            self.feedback[:] = left_over
        return Reply(self.version, seq, codec.spec, False, payload)

    def _overflow(self, seq: int) -> NonFiniteError:
        return NonFiniteError(
            f"the update of part {self.part.index} at round {seq} overflowed",
            hint="lower the learning rate, warm it up, or clip the gradient (`clip_norm=`)",
        )

    def _runs(self, used: NDArray[np.bool_]) -> list[tuple[int, int, int, int]]:
        """Neighbouring pieces that are updated alike, as (start, stop, group, step)."""
        runs: list[tuple[int, int, int, int]] = []
        offsets = self.part.layout.offsets
        for piece, (group, step, is_used) in enumerate(
            zip(self.groups, self.steps.tolist(), used.tolist(), strict=True)
        ):
            if not is_used:
                continue
            start, stop = offsets[piece], offsets[piece + 1]
            if runs and runs[-1][1:] == (start, group, step):
                start = runs.pop()[0]
            runs.append((start, stop, group, step))
        return runs

    def _unused(self, used: NDArray[np.bool_]) -> list[tuple[int, int]]:
        offsets = self.part.layout.offsets
        return [(offsets[i], offsets[i + 1]) for i in np.flatnonzero(~used).tolist()]
