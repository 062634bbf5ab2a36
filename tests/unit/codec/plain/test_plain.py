"""What all plain codecs promise: golden bytes, exactness, and an answer to any bytes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoestring.codec import registry
from shoestring.codec.base import Layout
from shoestring.errors import CodecError, NonFiniteError, StreamError
from tests.unit.codec.cases import BUCKETS, for_each

SPECS = ["float32", "float16", "bfloat16", "int8", "int8:block=5", "topk", "topk:ratio=0.25"]
LAYOUT = Layout.of([(2, 4), (0,), (5,)])
GRADIENT = np.array([1.0, -1.5, 0.1, -0.0, 3e-7, 1e5, 2.0, -2.0, 0.5, 0.5, -0.25, 1e-30, 0.0], np.float32)
GOLDEN = {
    "float32": "010100000000803f0000c0bfcdcccc3d00000080b00fa1340050c347"
    "00000040000000c00000003f0000003f000080be6042a20d00000000",
    "float16": "02010000003c00be662e00800500ff7b004000c00038003800b400000000",
    "bfloat16": "03010000803fc0bfcd3d0080a134c347004000c0003f003f80bea20d0000",
    "int8": "040100008f7e00000000006200004040e00000",
    "int8:block=5": "0401be5d7f8f7e40a00600006200004040e00000",
    "topk": "05010000050050c347000000003f",
    "topk:ratio=0.25": "0501c9fc05060050c34700000040000000003f",
}

given_few = settings(max_examples=150)


CODECS = [registry.make(spec) for spec in SPECS]


@for_each("spec", SPECS)
def test_golden_payload(spec):
    assert registry.make(spec).encode(GRADIENT, LAYOUT).tobytes().hex() == GOLDEN[spec]


@for_each("bucket", BUCKETS)
@for_each("codec", CODECS)
def test_sent_plus_kept_is_what_came_in(codec, bucket, same_bits):
    left_over = np.full_like(bucket.values, np.nan)
    sent = np.full_like(bucket.values, np.nan)
    codec.decode(codec.encode(bucket.values, bucket.layout, left_over), bucket.layout, sent)
    np.testing.assert_array_equal(sent.astype(np.float64) + left_over.astype(np.float64), bucket.values)
    same_bits(sent + left_over + np.float32(0), bucket.values + np.float32(0))  # but for the sign of zero


@for_each("bucket", BUCKETS)
@for_each("codec", CODECS)
def test_payload_does_not_depend_on_kept(codec, bucket):
    left_over = np.full_like(bucket.values, np.nan)
    with_left_over = codec.encode(bucket.values, bucket.layout, left_over)
    payload = codec.encode(bucket.values, bucket.layout)
    assert payload.tobytes() == with_left_over.tobytes()
    assert payload.dtype == np.uint8
    assert payload.size == codec.max_bytes(bucket.layout)


@for_each("codec", CODECS)
@for_each("weight", [1.0, 0.5, -1.0, 1 / 3, 0.0, 1e-40])
def test_decode_adds_weight_times_what_it_sets(codec, weight, same_bits):
    payload = codec.encode(GRADIENT, LAYOUT)
    values = np.full_like(GRADIENT, np.nan)
    codec.decode(payload, LAYOUT, values)
    before = np.random.default_rng(1).standard_normal(LAYOUT.total).astype(np.float32)
    out = before.copy()
    codec.decode(payload, LAYOUT, out, weight)
    same_bits(out, before + np.float32(weight) * values)


@for_each("codec", CODECS)
@for_each("kind", [bytes, bytearray, memoryview, lambda raw: memoryview(b"x" + raw)[1:]])
def test_any_buffer_decodes(codec, kind, same_bits):
    payload = codec.encode(GRADIENT, LAYOUT)
    want, out = np.empty_like(GRADIENT), np.full_like(GRADIENT, np.nan)
    codec.decode(payload, LAYOUT, want)
    codec.decode(kind(payload.tobytes()), LAYOUT, out)
    same_bits(out, want)


@for_each("codec", CODECS)
@for_each("bad", [np.nan, np.inf, -np.inf])
@for_each("place", [0, 7, 8, 12])
def test_non_finite_is_refused_before_anything_is_written(codec, bad, place, same_bits):
    values, left_over = GRADIENT.copy(), GRADIENT.copy()
    values[place] = bad
    with pytest.raises(NonFiniteError, match="tensor 0" if place < 8 else "tensor 2"):
        codec.encode(values, LAYOUT, left_over)
    same_bits(left_over, GRADIENT)


@for_each("codec", CODECS)
@for_each("weight", [np.nan, np.inf, 1e39])
def test_weight_that_is_no_float32_is_refused(codec, weight):
    with pytest.raises(CodecError, match="weight"):
        codec.decode(codec.encode(GRADIENT, LAYOUT), LAYOUT, np.zeros_like(GRADIENT), weight)


@for_each("codec", CODECS)
def test_every_wrong_length_is_refused(codec):
    payload = codec.encode(GRADIENT, LAYOUT).tobytes() + b"\x00"
    for length in range(len(payload) + 1):
        if length != len(payload) - 1:
            with pytest.raises(StreamError, match="bytes, expected"):
                codec.decode(payload[:length], LAYOUT, np.empty_like(GRADIENT))


@for_each("codec", CODECS)
def test_every_wrong_header_bit_is_refused(codec):
    payload = codec.encode(GRADIENT, LAYOUT)
    for bit in range(32):
        wrong = payload.copy()
        wrong[bit // 8] ^= 1 << bit % 8
        with pytest.raises(StreamError, match="header"):
            codec.decode(wrong, LAYOUT, np.empty_like(GRADIENT))


def _decode_or_refuse(codec, payload: bytes) -> None:
    """Values, all finite, or `StreamError` and then, when adding, `out` as it was."""
    out = np.full(LAYOUT.total, np.nan, np.float32)
    before = np.arange(LAYOUT.total, dtype=np.float32)
    added = before.copy()
    try:
        codec.decode(payload, LAYOUT, out)
    except StreamError:
        with pytest.raises(StreamError):
            codec.decode(payload, LAYOUT, added, 1.0)
        assert added.tobytes() == before.tobytes()
    else:
        assert np.isfinite(out).all()
        codec.decode(payload, LAYOUT, added, 0.5)
        assert added.tobytes() == (before + np.float32(0.5) * out).tobytes()


@pytest.mark.parametrize("spec", SPECS)
@given_few
@given(data=st.data())
def test_mutated_payloads_give_values_or_stream_error(spec, data):
    codec = registry.make(spec)
    payload = bytearray(codec.encode(GRADIENT, LAYOUT).tobytes())
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    _decode_or_refuse(codec, bytes(payload))


@pytest.mark.parametrize("spec", SPECS)
@given_few
@given(data=st.data())
def test_random_bytes_give_values_or_stream_error(spec, data):
    codec = registry.make(spec)
    whole = codec.encode(GRADIENT, LAYOUT).tobytes()
    body = data.draw(st.binary(min_size=len(whole) - 4, max_size=len(whole) - 4))
    _decode_or_refuse(codec, whole[:4] + body)
    _decode_or_refuse(codec, data.draw(st.binary(max_size=2 * len(whole))))


@pytest.mark.parametrize("spec", SPECS)
@given_few
@given(values=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=13, max_size=13))
def test_encoding_what_was_decoded_changes_nothing(spec, values):
    codec = registry.make(spec)
    payload = codec.encode(np.array(values, np.float32), LAYOUT)
    decoded = np.empty(13, np.float32)
    codec.decode(payload, LAYOUT, decoded)
    again = np.empty(13, np.float32)
    codec.decode(codec.encode(decoded, LAYOUT), LAYOUT, again)
    np.testing.assert_array_equal(again, decoded)
