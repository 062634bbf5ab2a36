"""The entropy of a stream's codes against one that is counted by hand."""

import math
from collections import Counter

import numpy as np
import pytest

from shoestring.bench.codec.entropy import entropy, entropy_gap, ideal_bits
from shoestring.bench.codec.gradients import Bucket
from shoestring.codec.registry import make


def brute_force(codes):
    counts = Counter(codes)
    return -sum(n * math.log2(n / len(codes)) for n in counts.values())


@pytest.mark.parametrize("codes", [[0], [5], [0, 0, 1, -1], [3, 3, 0, -7, 0, 0, 0, 1], [2] * 9 + [0]])
def test_entropy_of_codes(codes):
    nonzero = np.array([code for code in codes if code], np.int16)
    found = entropy(nonzero, zeros=codes.count(0)) * len(codes)
    assert found == pytest.approx(brute_force(codes), abs=1e-12)


def test_ideal_bits_of_untransformed_tensors_are_those_of_the_decoded_values():
    # Without a transform a decoded value is its code times the step, so equal codes are equal values.
    rng = np.random.default_rng(5)
    bucket = Bucket.of(
        "tiny",
        [
            rng.standard_normal((40, 50)).astype(np.float32),
            np.zeros(300, np.float32),
            rng.laplace(size=777).astype(np.float32),
            rng.standard_normal(10).astype(np.float32),  # small: sent as float16
        ],
    )
    codec = make("dct:transform=never,step=0.7")
    payload = codec.encode(bucket.values, bucket.layout)
    decoded = np.empty_like(bucket.values)
    codec.decode(payload, bucket.layout, decoded)
    first, second, third, _ = np.split(decoded, bucket.layout.offsets[1:-1])
    assert len(set(first.tolist())) > 4
    wanted = brute_force(first.tolist()) + brute_force(second.tolist()) + brute_force(third.tolist()) + 160
    assert ideal_bits(payload, bucket.layout) == pytest.approx(wanted, rel=1e-12)
    assert entropy_gap(payload, bucket.layout) == pytest.approx(8 * payload.nbytes / wanted - 1, rel=1e-12)


def test_floats_count_in_full():
    bucket = Bucket.of("small", [np.ones(100, np.float32)])
    for form, bits in (("float16", 1600), ("float32", 3200)):
        payload = make(f"dct:small_as={form}").encode(bucket.values, bucket.layout)
        assert ideal_bits(payload, bucket.layout) == bits


def test_tensors_of_many_chunks_and_tiles_are_counted_whole():
    rng = np.random.default_rng(6)
    values = rng.integers(-3, 4, 600_000).astype(np.float32)
    bucket = Bucket.of("long", [values])
    codec = make("dct:transform=never,step=0.1")
    payload = codec.encode(bucket.values, bucket.layout)
    decoded = np.empty_like(values)
    codec.decode(payload, bucket.layout, decoded)
    assert ideal_bits(payload, bucket.layout) == pytest.approx(brute_force(decoded.tolist()), rel=1e-12)


def test_nothing_has_no_gap():
    bucket = Bucket.of("zeros", [np.zeros(1000, np.float32)])
    assert entropy_gap(make("dct").encode(bucket.values, bucket.layout), bucket.layout) is None
