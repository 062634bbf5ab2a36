"""A part of which workers keep some values in two bytes: the shard has them in float32, the master.

The rule works on the master, whatever the codec. After a lossless reply workers hold the master,
rounded. With a lossy one `held` is what they hold: what they lack of the rounded master is coded;
both sides add what is decoded, in float32, and round. Nothing else has to be kept: the next
difference has all that this one left out.

It is the rounded master that is sent, not the master: a difference too small for two bytes would
cost bits, turn values to and fro, and tell workers nothing that they could keep.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoestring.codec.base import Payload, Vector
from shoestring.codec.registry import LOSSLESS, codec_of
from shoestring.errors import NonFiniteError
from shoestring.model.layers import Layer
from shoestring.model.parts import Part
from shoestring.model.precision import Precision
from shoestring.model.rules import Rule
from shoestring.model.vectors import PARAMS
from shoestring.server import rules
from shoestring.server.holding import Holding, Reply


class MasterHolding(Holding):
    """`params` is the master."""

    def __init__(
        self,
        part: Part,
        rule: Rule,
        groups: Sequence[int],
        layers: Sequence[Layer] = (),
        *,
        precision: Precision,
    ) -> None:
        super().__init__(part, rule, groups, layers)
        self.precision = precision
        self.held: Vector | None = None  # none: the master, rounded

    @property
    def values(self) -> Vector:
        if self.held is not None:
            return self.held
        rounded = self.params.copy()
        self.precision.round(rounded)
        return rounded

    @property
    def has_feedback(self) -> bool:
        return self.held is not None

    def put(self, vectors: Mapping[str, NDArray[Any]]) -> None:
        """As of any part; where workers have not changed what they hold, the master stays as it is."""
        others = {name: vector for name, vector in vectors.items() if name != PARAMS}
        super().put(others)
        if PARAMS in vectors:
            new = np.asarray(vectors[PARAMS], np.float32)
            is_set = self.values.view(np.uint32) != new.view(np.uint32)
            self.params[is_set] = new[is_set]
            if self.held is not None:
                self.held[:] = new

    def begin_feedback(self) -> None:
        self.held = np.zeros_like(self.params)

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
        """Update the master, and say how workers follow."""
        self.held = None if codec == LOSSLESS else self.values
        self._update(rules.apply, gradient, scale, hyper, used)
        self.version += 1
        if self.held is None:
            return self.full(seq, slot)
        lacked = gradient  # its memory
        lacked[:] = self.params
        self.precision.round(lacked)
        lacked -= self.held
        return self._follow(lacked, self.held, codec, seq)

    def full(self, seq: int, slot: int = -1) -> Reply:
        """Return the whole part as workers are to hold it; in a slot it may not be rounded yet."""
        values = self.params if self.held is None else self.held
        if slot >= 0:
            self.slots[slot][:] = values
        payload: Payload = self.slots[slot].view(np.uint8) if slot >= 0 else self.precision.pack(values)
        return Reply(self.version, seq, LOSSLESS, True, payload, slot=slot)

    def _follow(self, lacked: Vector, held: Vector, codec_name: str, seq: int) -> Reply:
        codec, layout = codec_of(codec_name), self.part.layout
        try:
            payload = codec.encode(lacked, layout)
        except NonFiniteError as error:
            raise self._overflow(seq) from error
        codec.decode(payload, layout, held, 1.0)
        self.precision.round(held)
        if not np.isfinite(held.sum()) and not np.isfinite(held).all():
            raise self._overflow(seq)
        return Reply(self.version, seq, codec.spec, False, payload)
