"""Feedback: what payloads left over so far, added to the next gradient.

The vector `kept` is the feedback of a bucket. With `came in = kept + gradient` (float32), each
`encode` promises:
- the decoded payload plus the new `kept` is the vector that was coded, without rounding;
  for element-wise codecs that is `came in`, bit for bit;
- NaN or infinity, in the gradient or by overflow of the sum, is refused with
  `NonFiniteError`: nothing is sent and `kept` does not change;
- any other failure leaves `kept` unchanged as well.

So no part of a gradient is lost, only late.

Where gradients may be thrown away after they were coded (a script that zeroes or skips them), `settle`
says before the next one what became of the last: `kept` then goes on from it, or from what it was before.
"""

from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from shoestring.codec.base import Codec, Layout, Payload, Vector, check_vector
from shoestring.compiled.scratch import room
from shoestring.errors import CodecError, NonFiniteError
from shoestring.wire.messages import DISCARDED, OPEN

_KEPT = "kept"


class Feedback:
    """Encodes one bucket's gradients, step after step, losing nothing.

    Holds as much memory as the bucket; each thread that encodes has room for two more.
    Not thread-safe: one bucket has one `Feedback`, used from one thread.
    """

    def __init__(self, codec: Codec, layout: Layout) -> None:
        self.codec = codec
        self.layout = layout
        self._kept: Vector
        self._sure: Vector | None = None  # `kept` as the last gradient that was taken has left it
        self.reset()

    @property
    def kept(self) -> Vector:
        """The values that have not been sent yet: a read-only copy."""
        copy = self._kept.copy()
        copy.flags.writeable = False
        return copy

    @property
    def waiting(self) -> Vector:
        """The same values as a read-only view: for callers that add the next gradient themselves."""
        view = self._kept.view()
        view.flags.writeable = False
        return view

    def encode(self, gradient: Vector) -> Payload:
        """Encode the gradient plus `kept`; what the payload leaves over becomes `kept`."""
        check_vector(gradient, self.layout, "gradient")
        came_in = room("came_in", self.layout.total, np.float32)[: self.layout.total]
        with np.errstate(over="ignore", invalid="ignore"):  # the codec refuses the infinity
            np.add(self._kept, gradient, out=came_in)
        return self.encode_total(came_in)

    def encode_total(self, came_in: Vector, spared: Iterable[tuple[int, int]] = ()) -> Payload:
        """Encode a vector that already contains `kept`; what the payload leaves over becomes `kept`.

        Where a range is spared, `kept` stays as it is.
        """
        left_over = room("left_over", self.layout.total, np.float32)[: self.layout.total]
        payload = self.codec.encode(came_in, self.layout, left_over)
        for start, stop in spared:
            left_over[start:stop] = self._kept[start:stop]
        self._kept[:] = left_over
        return payload

    def settle(self, fates: bytes) -> None:
        """Say what became of the gradients coded so far, a fate for each tensor; empty: all were taken."""
        if self._sure is None or not fates:
            self._sure = self._kept.copy()
            return
        for start, stop, fate in ranges(fates, self.layout):
            if fate == DISCARDED:
                self._kept[start:stop] = self._sure[start:stop]
            else:
                self._sure[start:stop] = self._kept[start:stop]

    def lend(self, values: Vector) -> None:
        """Add `kept` to a vector; the rounding errors of the sums become `kept`."""
        own = values.copy()
        values += self._kept
        added = values - own
        self._kept = (own - (values - added)) + (self._kept - added)  # exact: Knuth's sum of two

    def add(self, values: Vector) -> None:
        """Keep further values: what a receiver could not hold of those it was lent."""
        self._kept += values

    def scale(self, factor: float) -> None:
        """Multiply `kept`, for gradients that count more or less from now on."""
        self._kept *= np.float32(factor)
        if self._sure is not None:
            self._sure *= np.float32(factor)

    def reset(self) -> None:
        """Set `kept` to zero."""
        self._kept = np.zeros(self.layout.total, np.float32)

    def state(self) -> dict[str, NDArray[np.float32]]:
        """Copy what a checkpoint needs."""
        return {_KEPT: self._kept.copy()}

    def load(self, state: Mapping[str, NDArray[np.float32]]) -> None:
        """Continue from a `state`; one that does not fit is refused and changes nothing."""
        if set(state) != {_KEPT}:
            raise CodecError(
                f"feedback state has {sorted(state)}, expected `{_KEPT}` alone",
                hint="load what `Feedback.state` returned",
            )
        check_vector(state[_KEPT], self.layout, _KEPT)
        if not np.isfinite(state[_KEPT]).all():
            raise NonFiniteError(
                f"feedback state `{_KEPT}` holds NaN or infinity",
                hint="load an older checkpoint, or `reset` the feedback to start from zero",
            )
        # A copy. Zeros lose their sign: then what comes in is never -0.0, which no sum gives back.
        self._kept = state[_KEPT] + np.float32(0)


def ranges(fates: bytes, layout: Layout) -> Iterable[tuple[int, int, int]]:
    """The ranges of a vector whose fate is known, as (start, stop, fate)."""
    for start, stop, fate in zip(layout.offsets, layout.offsets[1:], fates, strict=False):
        if fate != OPEN and stop > start:
            yield start, stop, fate
