"""The quantisation step of each tensor, as an encoder and a decoder see it.

A step is `mantissa * 2**exponent`, 16 to 31 times a power of two, so that a decoded
value is an integer times a power of two. An encoder also needs the grid that it
rounds its input to before it transforms: a power of two, fine enough not to matter
and coarse enough that `came in - sent` is exact in float32 (README.md, "Feedback").
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoestring.codec.dct.format import (
    GRID_LOG2,
    MAX_EXPONENT,
    MAX_MANTISSA,
    MIN_EXPONENT,
    MIN_MANTISSA,
)

# Below one half: a dead zone, which saves more bits than it costs fidelity.
ROUNDING = np.float32(11 / 32)
# A value beyond this many steps could overflow the integer transform.
MAX_STEPS = 2048


@dataclass(frozen=True)
class Steps:
    """One entry a tensor. Tensors without blocks have harmless placeholders."""

    inverse: NDArray[np.float32]  # 1 / step
    threshold: NDArray[np.float32]  # below it a coefficient is zero
    magic: NDArray[np.float32]  # (x + magic) - magic rounds x to its grid
    mantissa: NDArray[np.int32]
    scale: NDArray[np.float32]  # what the decoded integer is multiplied by

    @property
    def arrays(self) -> tuple[NDArray[Any], ...]:
        return (self.inverse, self.threshold, self.magic, self.mantissa, self.scale)


def nearest(step: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return (mantissa, exponent) of the nearest step that can be sent."""
    fraction, exponent = np.frexp(step)  # fraction in [0.5, 1)
    mantissa = np.rint(fraction * 2 * MIN_MANTISSA).astype(np.int64)
    exponent = exponent.astype(np.int64) - 5
    carry = mantissa > MAX_MANTISSA
    return np.where(carry, MIN_MANTISSA, mantissa), np.where(carry, exponent + 1, exponent)


def of_headers(headers: NDArray[np.void], largest: NDArray[np.float64] | None = None) -> Steps:
    """Derive the steps; an encoder gives each tensor's largest magnitude as well."""
    step, inverse, threshold, mantissa, scale = _every_step()
    own = headers.view("<u4") >> 16  # mantissa and exponent
    magic = np.zeros(own.size, np.float32)
    if largest is not None:
        # All of came in, sent and kept lie below this, and so below 2**23 grid units.
        steps = step[own]
        bound = 2 * np.minimum(largest, MAX_STEPS * steps) + 32 * steps
        magic = np.ldexp(np.float32(1.5), np.frexp(bound)[1])
    return Steps(inverse[own], threshold[own], magic, mantissa[own], scale[own])


@cache
def _every_step() -> tuple[NDArray[Any], ...]:
    """All there is to know of the step with each mantissa (low byte) and exponent (high byte)."""
    low, high = np.tile(np.arange(256), 256), np.repeat(np.arange(256).astype(np.int8), 256)
    mantissa = np.clip(low, MIN_MANTISSA, MAX_MANTISSA).astype(np.int32)
    exponent = np.clip(high, MIN_EXPONENT, MAX_EXPONENT).astype(np.int32)
    step = np.ldexp(mantissa.astype(np.float64), exponent)
    return (
        step,
        (1 / step).astype(np.float32),
        ((1 - float(ROUNDING)) * step).astype(np.float32),
        mantissa,
        np.ldexp(1.0, exponent - GRID_LOG2).astype(np.float32),
    )
