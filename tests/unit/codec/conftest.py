"""Buckets that codecs find hard, for every codec test to run over."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from shoestring.codec.base import Layout, Vector

SHAPES = {
    "none": [],
    "empty": [(0,)],
    "1": [(1,)],
    "63": [(63,)],
    "64": [(64,)],
    "65": [(65,)],
    "1000": [(1000,)],
    "several": [(3, 5), (0,), (7,), (), (2, 0, 3), (13, 20), (1,)],
}


def _float32(bits: np.ndarray) -> Vector:
    return bits.astype(np.uint32).view(np.float32)


def _signed(magnitude_bits: np.ndarray, rng: np.random.Generator) -> Vector:
    return _float32(magnitude_bits | (rng.integers(0, 2, magnitude_bits.size) << 31))


def _huge(n: int, rng: np.random.Generator) -> Vector:
    values = _signed(rng.integers(0x7F000000, 0x7F800000, n), rng)
    values[: n // 2] = np.finfo(np.float32).max
    return values


INPUTS: dict[str, Callable[[int, np.random.Generator], np.ndarray]] = {
    "zeros": lambda n, rng: np.zeros(n),
    "negative zeros": lambda n, rng: np.full(n, -0.0),
    "signed zeros": lambda n, rng: _signed(np.zeros(n, np.int64), rng),
    "gaussian": lambda n, rng: rng.standard_normal(n),
    "gradient": lambda n, rng: 1e-4 * rng.standard_normal(n),
    "wide": lambda n, rng: _signed(rng.integers(0, 0x7F800000, n), rng),
    "denormal": lambda n, rng: _signed(rng.integers(0, 0x00800000, n), rng),
    "around the least normal": lambda n, rng: _signed(rng.integers(0x00000001, 0x04000000, n), rng),
    "huge": _huge,
    "beyond float16": lambda n, rng: _signed(rng.integers(0x477FD000, 0x53800000, n), rng),
    "float16 denormals": lambda n, rng: rng.integers(-64, 65, n) * 2.0**-26,
    "float16 ties": lambda n, rng: _signed(
        (rng.integers(0x38000, 0x47800, n) << 12) & 0x7FFFE000 | 0x1000, rng
    ),
    "bfloat16 ties": lambda n, rng: _signed((rng.integers(0, 0x7F80, n) << 16) | 0x8000, rng),
    "int8 ties": lambda n, rng: rng.integers(-128, 128, n) + 0.5,
    "int8 peaks": lambda n, rng: rng.choice([126.5, 127.0, 127.49999, 127.5, 127.50001, 128.0, 1.5], n),
    "equal magnitudes": lambda n, rng: rng.choice([-2.0, -1.0, 1.0, 2.0], n),
}


@dataclass(frozen=True)
class Bucket:
    layout: Layout
    values: Vector

    def tensors(self) -> list[list[float]]:
        """The values of each tensor as Python floats, for naive references."""
        bounds = zip(self.layout.offsets[:-1], self.layout.offsets[1:], strict=True)
        return [self.values[start:end].tolist() for start, end in bounds]


@pytest.fixture(params=SHAPES)
def layout(request: pytest.FixtureRequest) -> Layout:
    return Layout.of(SHAPES[request.param])


@pytest.fixture(params=INPUTS)
def bucket(request: pytest.FixtureRequest, layout: Layout) -> Bucket:
    values = INPUTS[request.param](layout.total, np.random.default_rng(layout.total))
    assert layout.total == sum(math.prod(shape) for shape in layout.shapes)
    return Bucket(layout, values.astype(np.float32))


@pytest.fixture
def same_bits() -> Callable[[Vector, Vector], None]:
    """Assert that two vectors are equal bit for bit, so that -0.0 is not 0.0."""

    def check(found: Vector, expected: Vector) -> None:
        assert found.dtype == expected.dtype == np.float32
        np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))

    return check
