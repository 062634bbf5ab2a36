"""top-k against sorting."""

import struct

import numpy as np
import pytest

from shoestring.codec.base import Layout
from shoestring.codec.plain.topk import TopK
from shoestring.errors import StreamError, UsageError
from tests.unit.codec.cases import BUCKETS, for_each

HEADER = b"\x05\x01\x00\x00"
HALF = TopK(ratio=0.5)


def naive(tensors: list[list[float]], ratio: float) -> tuple[bytes, list[float]]:
    body, decoded = b"", []
    for tensor in tensors:
        size = len(tensor)
        count = max(1, round(ratio * size)) if size else 0
        by_magnitude = sorted(range(size), key=lambda i: (-abs(tensor[i]), i))
        chosen = sorted(by_magnitude[:count])
        width = next(width for width in range(1, 9) if size <= 256**width)
        body += b"".join(index.to_bytes(width, "little") for index in chosen)
        body += b"".join(struct.pack("<f", tensor[index]) for index in chosen)
        decoded += [x if index in chosen else 0.0 for index, x in enumerate(tensor)]
    return body, decoded


@for_each("bucket", BUCKETS)
@for_each("ratio", [0.01, 0.3, 1.0])
def test_payload_and_decoded_equal_reference(bucket, ratio, same_bits):
    codec = TopK(ratio=ratio)
    body, decoded = naive(bucket.tensors(), ratio)
    payload = codec.encode(bucket.values, bucket.layout)
    assert payload[4:].tobytes() == body
    out = np.full_like(bucket.values, np.nan)
    codec.decode(payload, bucket.layout, out)
    same_bits(out, np.array(decoded, np.float32))


@for_each(
    ("size", "width"), [(1, 1), (256, 1), (257, 2), (65536, 2), (65537, 3), (1 << 24, 3), ((1 << 24) + 1, 4)]
)
def test_index_width(size, width):
    codec = TopK(ratio=1e-9)  # one value
    assert codec.max_bytes(Layout.of([(size,)])) == 4 + width + 4


def test_three_byte_indices_round_trip(same_bits):
    layout = Layout.of([(70_000,)])
    values = np.zeros(70_000, np.float32)
    values[[0, 255, 256, 65_535, 65_536, 69_999]] = [1, -2, 3, -4, 5, -6]
    codec, out = TopK(ratio=6 / 70_000), np.full(70_000, np.nan, np.float32)
    codec.decode(codec.encode(values, layout), layout, out)
    same_bits(out, values)


@for_each("indices", [[1, 0], [1, 1], [0, 4], [4, 5], [255, 254], [3, 255]])
def test_wrong_indices_are_refused(indices):
    head = HALF.encode(np.ones(4, np.float32), Layout.of([(4,)]))[:4].tobytes()
    payload = head + bytes(indices) + struct.pack("<ff", 1.0, 2.0)
    with pytest.raises(StreamError, match="indices"):
        HALF.decode(payload, Layout.of([(4,)]), np.zeros(4, np.float32))


@for_each("value", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_bytes_are_refused(value):
    payload = HEADER + struct.pack("<Bf", 0, value)
    with pytest.raises(StreamError, match="NaN or infinity"):
        TopK().decode(payload, Layout.of([(4,)]), np.zeros(4, np.float32))


@for_each("ratio", [0.0, -0.1, 1.0001, float("nan"), float("inf")])
def test_ratio_out_of_range_is_refused(ratio):
    with pytest.raises(UsageError, match="`ratio` is"):
        TopK(ratio=ratio)
