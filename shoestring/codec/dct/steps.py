"""The quantisation step of each tensor, as an encoder and a decoder see it.

A step is `mantissa * 2**exponent`, 16 to 31 times a power of two, so that a decoded
value is an integer times a power of two. An encoder also needs the grid that it
rounds its input to before it transforms: a power of two, fine enough not to matter
and coarse enough that `came in - sent` is exact in float32 (README.md, "Feedback").
"""

import math

import numpy as np
from numpy.typing import NDArray

from shoestring.codec.dct.format import (
    GRID_LOG2,
    MAX_EXPONENT,
    MAX_MANTISSA,
    MIN_EXPONENT,
    MIN_MANTISSA,
)
from shoestring.compiled.jit import decode_jit

Steps = NDArray[np.float32]  # [tensors, STEP_COLUMNS]

# Columns: 1 / step; the magnitude below which a coefficient is zero; what snaps x to its grid, as
# (x + magic) - magic; the mantissa; and what a decoded integer is multiplied by. Tensors without
# blocks have harmless placeholders.
INVERSE, THRESHOLD, MAGIC, MANTISSA, SCALE = range(5)
STEP_COLUMNS = 8

# Below one half: a dead zone, which saves more bits than it costs fidelity.
ROUNDING = np.float32(11 / 32)
# A value beyond this many steps could overflow the integer transform.
MAX_STEPS = 2048

_ROUNDING = float(ROUNDING)
_NONE = np.zeros(0)


def of_headers(headers: NDArray[np.void], largest: NDArray[np.float64]) -> Steps:
    """Derive an encoder's steps, from each tensor's largest magnitude as well."""
    steps = np.zeros((headers.size, STEP_COLUMNS), np.float32)
    find_steps(headers, largest, steps)
    return steps


def find_steps(headers: NDArray[np.void], largest: NDArray[np.float64], steps: Steps) -> None:
    """Like `of_headers`, but write into `steps` instead of allocating."""
    _find_steps(headers.view(np.uint8).reshape(-1, 4), largest, True, steps)


@decode_jit
def steps_of_decoder(headers, steps):
    """Derive a decoder's steps, from headers as bytes."""
    _find_steps(headers, _NONE, False, steps)


@decode_jit
def _find_steps(headers, largest, known, steps):
    for t in range(headers.shape[0]):
        mantissa = min(max(int(headers[t, 2]), MIN_MANTISSA), MAX_MANTISSA)
        exponent = int(headers[t, 3])
        exponent = min(max(exponent - 256 if exponent > 127 else exponent, MIN_EXPONENT), MAX_EXPONENT)
        step = math.ldexp(float(mantissa), exponent)
        magic = 0.0
        if known:
            # All of came in, sent and left over lie below this, and so below 2**23 grid units.
            bound = 2 * min(largest[t], MAX_STEPS * step) + 32 * step
            magic = math.ldexp(1.5, math.frexp(bound)[1])
        steps[t, INVERSE] = np.float32(1 / step)
        steps[t, THRESHOLD] = np.float32((1 - _ROUNDING) * step)
        steps[t, MAGIC] = np.float32(magic)
        steps[t, MANTISSA] = np.float32(mantissa)
        steps[t, SCALE] = np.float32(math.ldexp(1.0, exponent - GRID_LOG2))
