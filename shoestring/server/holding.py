"""One part as a shard holds it: parameters, optimizer state, and what the workers lack.

`params` is bit for bit what every up-to-date worker holds. With a lossy reply the update
is added to `kept`; what the codec sends of it is added to `params` here and at the
workers by the same exact decoder, and the rest stays in `kept`. With a lossless reply
(`float32`) `kept` is folded into `params` and the workers get `params` itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shoestring.codec.base import Codec, Payload, Vector
from shoestring.codec.registry import LOSSLESS
from shoestring.compiled.scratch import room
from shoestring.errors import NonFiniteError
from shoestring.model.layers import Layer
from shoestring.model.parts import Part
from shoestring.model.rules import Rule
from shoestring.model.statistics import History
from shoestring.server import rules


@dataclass(frozen=True)
class Reply:
    """What brings workers from `version - 1` to `version`. `codec` empty: nothing changed."""

    version: int
    seq: int
    codec: str
    is_full: bool
    payload: Payload
    plan: str = ""
    squares: float = 0.0  # of the mean gradient, where it is clipped
    slot: int = -1  # where in the shard's shared memory the payload is, if it is
    statistics: bytes = b""  # of the part's layers, as of this version
    paces: tuple[float, ...] = ()  # of the workers of this round, where they say it

    @property
    def size_bytes(self) -> int:
        return self.payload.nbytes + len(self.statistics)


class Holding:
    """The values of one part. Not thread-safe: one round at a time works on it."""

    def __init__(self, part: Part, rule: Rule, groups: Sequence[int], layers: Sequence[Layer] = ()) -> None:
        self.part = part
        self.rule = rule
        self.groups = tuple(groups)  # of each piece
        self.params: Vector = np.zeros(part.size, np.float32)
        self.state = {name: np.zeros(part.size, np.float32) for name in rule.state_names}
        self.kept: Vector | None = None
        self.steps = np.zeros(len(part.pieces), np.int64)  # updates of each piece so far
        self.version = 0
        self.history = History(layers)
        self.slots: tuple[Vector, ...] = ()  # shared memory to put the whole part into

    def advance(
        self,
        gradient: Vector,
        *,
        scale: float,
        hyper: Sequence[Sequence[float]],
        used: NDArray[np.bool_],
        codec: Codec,
        seq: int,
        slot: int = -1,
    ) -> Reply:
        """Apply the rule to a summed gradient (used up as scratch) and say how workers follow."""
        lossless = codec.name == LOSSLESS
        if lossless and self.kept is not None:
            self.params += self.kept
            self.kept = None
        self.steps[used] += 1
        for start, stop, group, step in self._runs(used):
            state = {name: vector[start:stop] for name, vector in self.state.items()}
            change = rules.apply if lossless else rules.update
            change(self.rule, hyper[group], self.params[start:stop], gradient[start:stop], state, step, scale)
        self.version += 1
        if lossless:
            return self.full(seq, slot)
        for start, stop in self._unused(used):
            gradient[start:stop] = 0
        return self._send(gradient, codec, seq)

    def hold(self, seq: int) -> Reply:
        """Count a round that changes nothing."""
        self.version += 1
        return Reply(self.version, seq, "", False, np.empty(0, np.uint8))

    def full(self, seq: int, slot: int = -1) -> Reply:
        """Return the whole part as it is now, in a slot or in memory of its own."""
        if slot < 0:
            return Reply(self.version, seq, LOSSLESS, True, self.params.copy().view(np.uint8))
        self.slots[slot][:] = self.params
        return Reply(self.version, seq, LOSSLESS, True, self.slots[slot].view(np.uint8), slot=slot)

    def _send(self, update: Vector, codec: Codec, seq: int) -> Reply:
        layout = self.part.layout
        if self.kept is not None:
            update += self.kept
        kept = room("holding_kept", update.size, np.float32)[: update.size]
        try:
            payload = codec.encode(update, layout, kept)
        except NonFiniteError as error:
            raise NonFiniteError(
                f"the update of part {self.part.index} at round {seq} overflowed",
                hint="lower the learning rate, warm it up, or clip the gradient (`clip_norm=`)",
            ) from error
        codec.decode(payload, layout, self.params, 1.0)
        if self.kept is None:
            self.kept = np.empty_like(update)
        self.kept[:] = kept
        return Reply(self.version, seq, codec.spec, False, payload)

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
