"""float16 against `struct`'s half floats and integer arithmetic."""

import math
import struct

import numpy as np
import pytest

from shoestring.codec.base import Layout
from shoestring.codec.plain.float16 import Float16
from shoestring.errors import StreamError
from tests.unit.codec.cases import BUCKETS, for_each

HEADER = b"\x02\x01\x00\x00"
MAX = 65504


def naive(x: float) -> bytes:
    if abs(x) > MAX:
        last_place = 2.0 ** (math.frexp(x)[1] - 24)
        x = math.copysign(MAX // last_place * last_place, x)
    return struct.pack("<e", x)


@for_each("bucket", BUCKETS)
def test_payload_equals_reference(bucket):
    want = HEADER + b"".join(naive(x) for x in bucket.values.tolist())
    assert Float16().encode(bucket.values, bucket.layout).tobytes() == want


def test_every_half_decodes_to_its_value(same_bits):
    halves = np.array([h for h in range(1 << 16) if h & 0x7C00 != 0x7C00], "<u2")
    out = np.full(halves.size, np.nan, np.float32)
    Float16().decode(HEADER + halves.tobytes(), Layout.of([halves.shape]), out)
    want = struct.unpack(f"<{halves.size}e", halves.tobytes())
    same_bits(out, np.array(want, np.float32))


@for_each(
    ("value", "sent"),
    [
        (65519.99, 65504.0),
        (65520.0, 65504.0),
        (-1e6, -65504.0),
        (2.0**28, 65504.0),
        (2.0**29, 65472.0),
        (2.0**30, 65408.0),
        (-(2.0**38), -32768.0),
        (2.0**39, 0.0),
        (3.4028235e38, 0.0),
        (2.0**-24, 2.0**-24),
        (2.0**-25, 0.0),
        (2.0**-25 * 1.001, 2.0**-24),
        (1e-10, 0.0),
    ],
)
def test_out_of_range_stays_kept(value, sent):
    values = np.array([value], np.float32)
    layout, left_over, out = Layout.of([(1,)]), np.empty(1, np.float32), np.empty(1, np.float32)
    Float16().decode(Float16().encode(values, layout, left_over), layout, out)
    assert out[0] == sent
    assert float(left_over[0]) == float(values[0]) - sent  # in float64


@for_each("half", [0x7C00, 0xFC00, 0x7E00, 0x7C01])
def test_non_finite_bytes_are_refused(half):
    payload = HEADER + struct.pack("<HH", 0, half)
    with pytest.raises(StreamError, match="NaN or infinity"):
        Float16().decode(payload, Layout.of([(2,)]), np.zeros(2, np.float32))
