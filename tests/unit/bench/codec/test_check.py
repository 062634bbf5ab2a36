"""What is wrong is not timed."""

import numpy as np
import pytest

from shoestring.bench.codec import check
from shoestring.bench.codec import suite as codec
from shoestring.bench.codec.check import normalised_error, verify
from shoestring.bench.codec.gradients import Bucket
from shoestring.bench.machine import Memcpy
from shoestring.codec.base import Layout
from shoestring.codec.dct import Dct
from shoestring.codec.plain.float16 import Float16
from shoestring.errors import CodecError


class OtherBytes(Float16):
    calls = 0

    def _encode(self, values, layout, left_over):
        payload = super()._encode(values, layout, left_over)
        payload[-1] ^= self.calls % 2
        self.calls += 1
        return payload


class TooLong(Float16):
    def max_bytes(self, layout):
        return super().max_bytes(layout) - 1 if self.lies else super().max_bytes(layout)

    lies = False

    def _encode(self, values, layout, left_over):
        payload = super()._encode(values, layout, left_over)
        self.lies = True
        return payload


class BytesByFeedback(Float16):
    def _encode(self, values, layout, left_over):
        payload = super()._encode(values, layout, left_over)
        payload[-1] ^= left_over is not None
        return payload


class RoundedSum(Float16):
    def _encode(self, values, layout, left_over):
        payload = super()._encode(values, layout, left_over)
        if left_over is not None:
            left_over += np.float32(1e-9)
        return payload


class KeepsNothing(Float16):
    def _encode(self, values, layout, left_over):
        payload = super()._encode(values * np.float32(0.5), layout, left_over)
        if left_over is not None:
            left_over[:] = 0
        return payload


class ForgetsToWrite(Float16):
    def _decode(self, payload, layout, out, weight):
        super()._decode(payload, layout, out[: layout.total], weight)
        if weight is None:
            out[-1] = np.nan


class AddsTwice(Float16):
    def _decode(self, payload, layout, out, weight):
        super()._decode(payload, layout, out, weight)
        if weight is not None:
            super()._decode(payload, layout, out, weight)


class IgnoresWeight(Float16):
    def _decode(self, payload, layout, out, weight):
        super()._decode(payload, layout, out, None if weight is None else 1.0)


class OtherThreads(Float16):
    def _encode(self, values, layout, left_over):
        payload = super()._encode(values, layout, left_over)
        payload[-1] ^= self.threads == 1
        return payload


class OffByABit(Dct):
    def _decode(self, payload, layout, out, weight):
        super()._decode(payload, layout, out, weight)
        if weight is None:
            out[0] = np.nextafter(out[0], np.float32(9))


@pytest.mark.parametrize(
    ("broken", "problem"),
    [
        (OtherBytes(), "a second encoding gives other bytes"),
        (TooLong(), "above its limit"),
        (BytesByFeedback(), "feedback changes the bytes"),
        (RoundedSum(), "what is sent plus what is left over is rounded"),
        (KeepsNothing(), "what is sent plus what is left over is off by 0.25"),
        (ForgetsToWrite(), "NaN or infinity"),
        (AddsTwice(), "adding onto zeros is not setting"),
        (IgnoresWeight(), "adding with a weight is not adding"),
        (OtherThreads(threads=2), "one thread gives other bytes"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_broken_codec_is_refused_before_the_clock_starts(bucket, monkeypatch, broken, problem):
    def fail(call, effort):
        raise AssertionError("timed")

    monkeypatch.setattr(codec, "time_call", fail)
    with pytest.raises(CodecError, match="is not timed on `small`") as error:
        codec.measure(broken, bucket, Memcpy(1), codec.QUICK)
    assert problem in error.value.message


def test_bits_of_the_definition_are_demanded(bucket):
    assert check._equals_reference(Dct(), bucket)
    assert not check._equals_reference(OffByABit(), bucket)


@pytest.mark.parametrize("spec", ["dct", "dct:block=8,bits=1", "float32", "bfloat16", "int8", "topk"])
@pytest.mark.parametrize("threads", [1, 2])
def test_our_own_codecs_pass(bucket, spec, threads):
    one = codec.build(spec, threads)
    coded = verify(one, bucket)
    decoded = np.empty_like(bucket.values)
    one.decode(coded.payload, bucket.layout, decoded)
    np.testing.assert_array_equal(coded.values, decoded)


def test_slice_keeps_shapes_and_first_values():
    big = np.arange(100 * 64 * 9, dtype=np.float32).reshape(100, 64, 3, 3)
    long = np.arange(9000, dtype=np.float32).reshape(1, 9000)
    small = check.cut(Bucket.of("big", [big, long, np.float32([[1, 2]])]))
    assert small.layout.shapes == ((7, 64, 3, 3), (4096,), (1, 2))
    np.testing.assert_array_equal(small.values[: 7 * 576], big[:7].ravel())
    assert check.cut(Bucket.of("none", [])).values.size == 0


def test_error_is_relative_to_each_tensor_and_weighted_by_size():
    layout = Layout.of([(3,), (1,), (0,), (4,)])
    wanted = np.float32([1, 2, 2, 1e-6, 0, 0, 0, 0])
    found = np.float32([1, 2, 5, 0, 0, 0, 0, 0])
    assert normalised_error(found, wanted, layout) == pytest.approx((3 * 1.0 + 1 * 1.0) / 8, rel=1e-12)
    found[-1] = 1e-3  # something out of nothing
    assert normalised_error(found, wanted, layout) == pytest.approx((3 + 1 + 4) / 8, rel=1e-12)
    assert normalised_error(wanted[:0], wanted[:0], Layout.of([])) == 0
