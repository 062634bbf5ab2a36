"""Every value rounded to IEEE 754 binary16: two bytes each.

Body: the values as binary16, rounded to nearest, ties to even. A value beyond
+-65504 is sent as that limit and the rest is left over, so it drains over several
pushes; a value too small is sent as 0 and left over until it has grown.

From 2**29 on, 65504 is no multiple of a value's last place and taking it off
would round. There the largest multiple below it is sent; from 2**39 on that is
0, and the whole value is left over.
"""

import numpy as np

from shoestring.codec.base import Layout, Payload, Vector
from shoestring.codec.plain.base import PlainCodec

LIMIT = np.float32(65504)
_EXPONENT = 0x7C00  # all ones: NaN or infinity
_MANTISSA_BITS = 24


class Float16(PlainCodec):
    """IEEE half precision: two bytes a value."""

    name = "float16"
    code = 2

    def _body_bytes(self, layout: Layout) -> int:
        return 2 * layout.total

    def _write(self, values: Vector, layout: Layout, body: Payload) -> None:
        halves = body.view("<f2")
        halves[:] = np.clip(values, -LIMIT, LIMIT)
        beyond = np.flatnonzero(np.abs(values) > LIMIT)
        if beyond.size:
            large = values[beyond]
            last_place = np.ldexp(np.float32(1), np.frexp(large)[1] - _MANTISSA_BITS)
            halves[beyond] = np.copysign(LIMIT - np.fmod(LIMIT, last_place), large)

    def _read(self, body: Payload, layout: Layout) -> Vector:
        if ((body.view("<u2") & _EXPONENT) == _EXPONENT).any():
            raise self._broken("NaN or infinity")
        return body.view("<f2").astype(np.float32)
