"""Many cases within one test, and the buckets that codecs find hard."""

import functools
import inspect
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

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


def for_each(names: str | tuple[str, ...], cases: Iterable[Any]) -> Callable[[Callable], Callable]:
    """Run a test for every case, as `pytest.mark.parametrize` does, but as one item.

    A failure carries a note that names its case.
    """
    own = (names,) if isinstance(names, str) else names
    given = [case if isinstance(names, tuple) else (case,) for case in cases]

    def decorate(test: Callable) -> Callable:
        @functools.wraps(test)
        def run(**fixtures) -> None:
            for case in given:
                chosen = dict(zip(own, case, strict=True))
                try:
                    test(**chosen, **fixtures)
                except BaseException as error:
                    for name, value in chosen.items():
                        error.add_note(f"{name}: {str(value)[:200]}")
                    raise

        signature = inspect.signature(test)
        left = [parameter for name, parameter in signature.parameters.items() if name not in own]
        run.__signature__ = signature.replace(parameters=left)
        return run

    return decorate


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
    name: str
    layout: Layout
    values: Vector

    def __str__(self) -> str:
        return self.name

    def tensors(self) -> list[list[float]]:
        """The values of each tensor as Python floats, for naive references."""
        bounds = zip(self.layout.offsets[:-1], self.layout.offsets[1:], strict=True)
        return [self.values[start:end].tolist() for start, end in bounds]


def _buckets() -> Iterable[Bucket]:
    for shape, shapes in SHAPES.items():
        layout = Layout.of(shapes)
        assert layout.total == sum(math.prod(shape) for shape in layout.shapes)
        for kind, make in INPUTS.items():
            values = make(layout.total, np.random.default_rng(layout.total)).astype(np.float32)
            yield Bucket(f"{kind} in {shape}", layout, values)


BUCKETS = list(_buckets())
