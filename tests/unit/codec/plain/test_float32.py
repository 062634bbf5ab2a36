"""float32 against `struct`."""

import struct

import numpy as np
import pytest

from shoestring.codec.base import Layout
from shoestring.codec.plain.float32 import Float32
from shoestring.errors import StreamError
from tests.unit.codec.cases import BUCKETS, for_each


@for_each("bucket", BUCKETS)
def test_payload_is_header_and_values(bucket):
    want = b"\x01\x01\x00\x00" + b"".join(struct.pack("<f", x) for x in bucket.values.tolist())
    assert Float32().encode(bucket.values, bucket.layout).tobytes() == want


@for_each("bucket", BUCKETS)
def test_decoded_is_what_was_encoded(bucket, same_bits):
    left_over = np.full_like(bucket.values, np.nan)
    payload = Float32().encode(bucket.values, bucket.layout, left_over)
    out = np.full_like(bucket.values, np.nan)
    Float32().decode(payload, bucket.layout, out)
    same_bits(out, bucket.values)
    same_bits(left_over, np.zeros_like(left_over))


@for_each("bits", [0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001])
def test_non_finite_bytes_are_refused(bits):
    payload = b"\x01\x01\x00\x00" + struct.pack("<fI", 1.0, bits)
    with pytest.raises(StreamError, match="NaN or infinity"):
        Float32().decode(payload, Layout.of([(2,)]), np.zeros(2, np.float32))
