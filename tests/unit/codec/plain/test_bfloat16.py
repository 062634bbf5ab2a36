"""bfloat16 against exact rational arithmetic."""

import math
import struct
from fractions import Fraction

import numpy as np
import pytest

from shoestring.codec.base import Layout
from shoestring.codec.plain.bfloat16 import BFloat16
from shoestring.errors import StreamError
from tests.unit.codec.cases import BUCKETS, for_each

HEADER = b"\x03\x01\x00\x00"
MAX = 255 * 2.0**120


def naive(x: float) -> float:
    """The nearest bfloat16: a multiple of 2**-7 of the value's binade, and of the least denormal."""
    step = Fraction(2) ** max(math.frexp(x)[1] - 8, -133)
    nearest = float(round(Fraction(x) / step) * step)  # `round` takes ties to even
    return math.copysign(min(abs(nearest), MAX), x)


@for_each("bucket", BUCKETS)
def test_payload_equals_reference(bucket):
    want = HEADER + b"".join(struct.pack("<f", naive(x))[2:] for x in bucket.values.tolist())
    assert BFloat16().encode(bucket.values, bucket.layout).tobytes() == want


def test_every_bfloat16_decodes_to_its_value(same_bits):
    halves = np.array([h for h in range(1 << 16) if h & 0x7F80 != 0x7F80], "<u2")
    out = np.full(halves.size, np.nan, np.float32)
    BFloat16().decode(HEADER + halves.tobytes(), Layout.of([halves.shape]), out)
    want = [struct.unpack("<f", struct.pack("<HH", 0, h))[0] for h in halves.tolist()]
    same_bits(out, np.array(want, np.float32))


@for_each("sign", [1, -1])
def test_what_would_round_to_infinity_is_the_largest_number(sign):
    values = sign * np.full(1, np.finfo(np.float32).max)
    layout, left_over, out = Layout.of([(1,)]), np.empty(1, np.float32), np.empty(1, np.float32)
    BFloat16().decode(BFloat16().encode(values, layout, left_over), layout, out)
    assert float(out[0]) == sign * MAX
    assert float(left_over[0]) == float(values[0]) - sign * MAX


@for_each("half", [0x7F80, 0xFF80, 0x7FC0, 0x7F81])
def test_non_finite_bytes_are_refused(half):
    payload = HEADER + struct.pack("<HH", 0, half)
    with pytest.raises(StreamError, match="NaN or infinity"):
        BFloat16().decode(payload, Layout.of([(2,)]), np.zeros(2, np.float32))
