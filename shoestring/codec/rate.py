"""How many bits to spend where.

Total squared error at a total rate is least where every tensor's error falls at the
same slope as its rate grows (Lagrange). For uniform quantisers with entropy coding
that slope is a fixed multiple of the squared step, at low rates as at high ones
(Sullivan 1996; video encoders rest on it). So equal steps are the best use of any
budget, and meeting one is a search for a single number: the step, relative to each
tensor's rms, whose modelled rate is the budget. Tensors count by normalised error,
so that a layer with small gradients is coded as faithfully as one with large ones.
"""

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

# With a threshold of 1 - 11/32 steps, the smallest coefficient that gets a code removes this
# much squared error, in steps squared. Over the bits of a code it is the slope at the margin.
MARGINAL_GAIN = 1 - 2 * 11 / 32


LOWEST_STEP, HIGHEST_STEP = 2.0**-8, 2.0**10
_CLOSE = 0.01  # of the logarithm of the bits
_REACH = 0.7  # how far a step must go for a change of the bits, both in logarithms
_FARTHEST = math.log(4)  # that a step goes at once
_LOOKS = 32


def typical_step(bits_a_value: float) -> float:
    """Return about the relative step that gradients need for a rate: where a search may begin."""
    if bits_a_value <= 0:
        return HIGHEST_STEP / 2
    step: float = 1.4 * (bits_a_value**-0.6 if bits_a_value < 1 else 2.0 ** (1 - bits_a_value))
    return min(max(step, 2 * LOWEST_STEP), HIGHEST_STEP / 2)


def common_step(modelled_bits: Callable[[float], float], *, budget_bits: float, start: float = 1.4) -> float:
    """Return the relative step at which `modelled_bits` (falling) meets the budget.

    Between two steps near each other the rate is close to a power of the step, so few looks are
    needed: each goes where the line through two others meets the budget, in logarithms. Once the
    budget lies between two looks, every other one halves what is left, so that a rate which falls
    off a cliff is found as well.
    """
    if budget_bits <= 0:
        return HIGHEST_STEP
    target = math.log(budget_bits)
    low, high = LOWEST_STEP, HIGHEST_STEP
    too_many = too_few = math.nan  # by how much the logarithm is off at `low` and `high`, once known
    step, reach, between = start, _REACH, 0
    before = (start, 0.0)
    for _ in range(_LOOKS):
        off = _log_bits(modelled_bits, step) - target
        if abs(off) < _CLOSE:
            return step
        if off > 0:
            low, too_many = step, off
        else:
            high, too_few = step, off
        if high / low < 1.005:
            break
        if math.isnan(too_many + too_few):
            if before[1] and before[1] != off:
                reach = max(math.log(step / before[0]) / (before[1] - off), _REACH / 4)
            before = (step, off)
            step *= math.exp(min(max(reach * off, -_FARTHEST), _FARTHEST))
            step = min(max(step, LOWEST_STEP), HIGHEST_STEP)
        else:
            between += 1
            step = low * (high / low) ** (too_many / (too_many - too_few) if between % 2 else 0.5)
    return high if high > LOWEST_STEP else low


def rate_weight(bits_a_value: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return what a bit is worth in squared error (in steps squared), at about this rate.

    A code takes about 3 bits for its sign and level and log2(1 / p) for its place; it
    stands at a share p of the places that is about a sixth of the rate.
    """
    share = np.minimum(np.maximum(bits_a_value / 6, 1e-6), 0.5)
    return MARGINAL_GAIN / (3 - np.log2(share))


def step_on_curve(steps: NDArray[np.float64], bits: NDArray[np.float64], *, budget_bits: float) -> float:
    """Return the step that meets the budget, where the rate is known at some steps."""
    if budget_bits <= 0:
        return float(steps[-1])
    falling = np.minimum.accumulate(np.log(np.maximum(bits, 1e-9)))
    return float(np.exp(np.interp(-math.log(budget_bits), -falling, np.log(steps))))


def _log_bits(modelled_bits: Callable[[float], float], step: float) -> float:
    return math.log(max(modelled_bits(step), 1e-9))
