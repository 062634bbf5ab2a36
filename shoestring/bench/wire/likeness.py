"""A model's parameters and gradients in likeness: shapes as models have them, values as training gives them.

Whoever knows a worker's number and the round knows its gradient to the bit, so each side of a
benchmark can say what the sum must be.
"""

import math

import numpy as np

from shoestring.codec.base import Vector

_WIDE, _NARROW = 512, 64
_WIDE_FROM = 4_000_000
_SCALE = 1e-3
_STRIDE = 9973  # a prime: no multiple of any row


def shapes(values: int) -> list[tuple[int, ...]]:
    """Tensors of a transformer with some convolutions, `values` in all."""
    w = _WIDE if values >= _WIDE_FROM else _NARROW
    layer: list[tuple[int, ...]] = [
        *((3 * w, w), (3 * w,), (w, w), (w,)),
        *((4 * w, w), (4 * w,), (w, 4 * w), (w,)),
        *((w // 2, w // 2, 3, 3), (w // 2,)),
    ]
    found = layer * (values // sum(math.prod(shape) for shape in layer))
    rest = values - sum(math.prod(shape) for shape in found)
    return [shape for shape in (*found, (rest // w, w), (rest % w,)) if math.prod(shape)]


def parameters(values: int) -> Vector:
    """What training starts from."""
    return np.random.default_rng(7).standard_normal(values, np.float32) * np.float32(0.02)


class Gradients:
    """One worker's gradients: what all workers see in every round, smooth, and noise with heavy tails."""

    def __init__(self, values: int, worker: int) -> None:
        waves = np.random.default_rng(11).standard_normal(2 + values // 16, np.float32)
        self._common = np.repeat(waves[:-1] + waves[1:], 16)[:values]
        self._noise = np.random.default_rng([13, worker]).standard_normal(values, np.float32)
        self._noise *= np.abs(self._noise)  # kurtosis of about 12, where a normal distribution has 3

    def of(self, number: int) -> Vector:
        """The gradient of a round: noise that is elsewhere each time is as good as new."""
        found = np.roll(self._noise, number * _STRIDE)
        found += self._common
        found *= np.float32(_SCALE)
        return found
