"""Bits at an equal error: the search lands where it should."""

import numpy as np
import pytest

from shoestring.bench.codec.gradients import Bucket
from shoestring.bench.codec.transform import bits_at, compare


def test_search_lands_on_the_error(bucket):
    # top-k of equal magnitudes: an error of e is left by sending 1 - e of the values, 6 bytes each.
    flat = Bucket.of("flat", [np.ones(60_000, np.float32)])
    for error in (0.5, 0.25, 0.1):
        bits = bits_at(flat, error, lambda x: f"topk:ratio={1 / x}", 1.0, 2.0**12)
        assert bits == pytest.approx(48 * (1 - error), rel=0.01)


def test_error_out_of_reach_is_none(bucket):
    assert bits_at(bucket, 0.9, lambda x: f"dct:step={x}", 0.1, 0.2) is None


def test_transform_pays_on_smooth_blocks_and_ratios_say_so():
    y, x = np.mgrid[0:8, 0:8]
    rng = np.random.default_rng(8)
    smooth = np.cos(np.pi * (2 * x + 1) / 16) * rng.standard_normal((512, 1, 1)) + 0 * y
    result = compare(Bucket.of("smooth", [smooth.reshape(512, 64).astype(np.float32)]), 0.1)
    assert result.dct_over_never == result.dct / result.never < 0.5
    assert result.dct_over_topk == result.dct / result.topk < 0.5
    assert result.dct_block_8_over_never == result.dct_block_8 / result.never
