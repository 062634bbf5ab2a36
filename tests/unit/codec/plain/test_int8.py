"""int8 against exact rational arithmetic, block by block."""

import zlib
from fractions import Fraction

import numpy as np
import pytest

from shoestring.codec.base import Layout
from shoestring.codec.plain.int8 import Int8
from shoestring.errors import StreamError, UsageError
from tests.unit.codec.cases import BUCKETS, for_each

HEADER = b"\x04\x01\x00\x00"


def naive_block(block: list[float]) -> tuple[int, list[int]]:
    """The least exponent whose codes all fit; at the top, where none does, the codes stop at 127."""
    peak = max(abs(Fraction(x)) for x in block)
    exponent = next((e for e in range(7, 255) if round(peak / Fraction(2) ** (e - 133)) <= 127), 254)
    codes = [round(Fraction(x) / Fraction(2) ** (exponent - 133)) for x in block]  # ties to even
    return exponent, [max(-127, min(127, code)) for code in codes]


def naive(tensors: list[list[float]], block: int) -> tuple[bytes, list[float]]:
    exponents, codes, decoded = [], [], []
    for tensor in tensors:
        for start in range(0, len(tensor), block):
            exponent, part = naive_block(tensor[start : start + block])
            exponents.append(exponent)
            codes += part
            decoded += [code * 2.0 ** (exponent - 133) for code in part]
    return bytes(exponents) + bytes(code & 0xFF for code in codes), decoded


@for_each("bucket", BUCKETS)
@for_each("block", [64, 7])
def test_payload_and_decoded_equal_reference(bucket, block, same_bits):
    codec = Int8(block=block)
    body, decoded = naive(bucket.tensors(), block)
    payload = codec.encode(bucket.values, bucket.layout)
    assert payload[4:].tobytes() == body
    out = np.full_like(bucket.values, np.nan)
    codec.decode(payload, bucket.layout, out)
    same_bits(out, np.array(decoded, np.float32))


def test_header_tells_block_sizes_apart():
    layout, values = Layout.of([(4,)]), np.ones(4, np.float32)
    assert Int8().encode(values, layout)[:4].tobytes() == HEADER
    check = (zlib.crc32(b"block=16") & 0xFFFF).to_bytes(2, "little")
    payload = Int8(block=16).encode(values, layout)
    assert payload[:4].tobytes() == b"\x04\x01" + check
    with pytest.raises(StreamError, match="header"):
        Int8().decode(payload, layout, np.zeros(4, np.float32))


@for_each("exponent", [0, 6, 255])
def test_exponent_out_of_range_is_refused(exponent):
    payload = HEADER + bytes((exponent, 0, 0))
    with pytest.raises(StreamError, match="exponent"):
        Int8().decode(payload, Layout.of([(2,)]), np.zeros(2, np.float32))


def test_code_out_of_range_is_refused():
    payload = HEADER + bytes((7, 0, 0x80))
    with pytest.raises(StreamError, match="-128"):
        Int8().decode(payload, Layout.of([(2,)]), np.zeros(2, np.float32))


@for_each("exponent", [7, 8, 133, 254])
def test_every_code_decodes_to_its_value(exponent):
    codes = list(range(-127, 128))
    out = np.full(255, np.nan, np.float32)
    payload = HEADER + bytes([exponent] * 4) + bytes(code & 0xFF for code in codes)
    Int8().decode(payload, Layout.of([(255,)]), out)
    assert out.tolist() == [code * 2.0 ** (exponent - 133) for code in codes]


@for_each("block", [0, -1, 65537])
def test_block_out_of_range_is_refused(block):
    with pytest.raises(UsageError, match="`block` is"):
        Int8(block=block)
