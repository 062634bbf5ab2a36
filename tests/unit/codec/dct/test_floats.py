"""Tensors sent as floats: float16 as NumPy has it, float32 to the bit, whatever their neighbours are."""

import numpy as np
import pytest

from shoestring.codec.base import Layout
from shoestring.codec.dct import format as fmt
from shoestring.codec.dct import stream
from shoestring.codec.dct.codec import Dct
from shoestring.codec.dct.floats import of_half, to_half
from shoestring.errors import StreamError
from tests.unit.codec.cases import for_each
from tests.unit.codec.dct.streams import BACKENDS, decode


def test_every_finite_float16_is_read_as_it_is():
    words = np.arange(1 << 16, dtype=np.uint16)
    words = words[words & 0x7C00 != 0x7C00]
    found = np.array([of_half(word) for word in words], np.float32)
    np.testing.assert_array_equal(
        found.view(np.uint32), words.view(np.float16).astype(np.float32).view(np.uint32)
    )


def test_float16_is_rounded_as_numpy_rounds():
    """Every float16 below 2**15, what lies half way to the next, and its neighbours."""
    halves = np.arange(0x7800, dtype=np.uint16).view(np.float16).astype(np.float32)
    ties = (halves[:-1] + halves[1:]) / 2
    beside = [np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(1e9))]
    tiny = np.array([1e-45, 2.0**-25, 2.0**-26, 1e-30], np.float32)
    values = np.concatenate([halves, ties, *beside, tiny])
    values = np.concatenate([values, -values])
    found = [to_half(value, bits) for value, bits in zip(values, values.view(np.uint32), strict=True)]
    np.testing.assert_array_equal(np.array(found, np.uint16), values.astype(np.float16).view(np.uint16))


@for_each("backend", BACKENDS)
def test_small_tensors_of_every_kind_beside_each_other(backend):
    layout = Layout.of([(3,), (40, 40), (7,), (5,), (2,), (1000,), (9,)])
    values = np.random.default_rng(1).standard_normal(layout.total).astype(np.float32)
    at = layout.offsets
    values[at[2] : at[3]] *= 2.0**112  # too large for float16 with a scale
    values[at[3] : at[4]] = 0
    values[at[4] : at[5]] *= 2.0**-75
    left_over = np.full_like(values, np.nan)
    payload = Dct(backend=backend).encode(values, layout, left_over)
    kinds = stream.parse(payload, layout).headers["kind"]
    small = [fmt.HALF, fmt.FULL, fmt.ZERO, fmt.HALF, fmt.HALF]
    assert kinds[[0, 2, 3, 4, 6]].tolist() == small
    sent = decode(backend, payload, layout)
    for index in (0, 2, 3, 4, 6):
        own = slice(at[index], at[index + 1])
        np.testing.assert_array_equal(sent[own] + left_over[own], values[own])
        np.testing.assert_allclose(sent[own], values[own], rtol=2.0**-11)
    np.testing.assert_array_equal(left_over[at[2] : at[3]], 0)


@for_each("bits", [0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001])
def test_float32_that_is_not_finite_is_refused(bits):
    layout = Layout.of([(3,), (5,)])
    payload = Dct(small_as="float32").encode(np.ones(8, np.float32), layout)
    payload[-8:-4] = np.array([bits], "<u4").view(np.uint8)
    for backend in BACKENDS:
        with pytest.raises(StreamError, match="tensor 1 holds NaN or infinity"):
            decode(backend, payload, layout)
