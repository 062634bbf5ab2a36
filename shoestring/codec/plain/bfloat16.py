"""Every value rounded to bfloat16, the upper half of a float32: two bytes each.

Body: the values as bfloat16, rounded to nearest, ties to even. What would round
to infinity is sent as the largest finite number instead.
"""

import numpy as np

from shoestring.codec.base import Layout, Payload, Vector
from shoestring.codec.plain.base import PlainCodec

_EXPONENT = 0x7F80  # all ones: NaN or infinity


class BFloat16(PlainCodec):
    """Brain float, the range of float32 with 8 bits of precision: two bytes a value."""

    name = "bfloat16"
    code = 3

    def _body_bytes(self, layout: Layout) -> int:
        return 2 * layout.total

    def _write(self, values: Vector, layout: Layout, body: Payload) -> None:
        bits = values.view(np.uint32)
        is_odd = (bits >> 16) & 1
        halves = (bits + 0x7FFF + is_odd) >> 16
        halves -= (halves & 0x7FFF) == _EXPONENT  # infinity less one is the largest finite number
        body.view("<u2")[:] = halves

    def _read(self, body: Payload, layout: Layout) -> Vector:
        halves = body.view("<u2")
        if ((halves & _EXPONENT) == _EXPONENT).any():
            raise self._broken("NaN or infinity")
        return (halves.astype(np.uint32) << 16).view(np.float32)
