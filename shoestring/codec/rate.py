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

# Minus the slope of error over rate, in units of step squared: 0.134 by the rule that
# video encoders use, (6 ln 2) / 32 = 0.130 in the middle of theory and practice here.
RATE_WEIGHT = 0.13

LOWEST_STEP, HIGHEST_STEP = 2.0**-8, 2.0**10
_SEARCH_STEPS = 9


def common_step(modelled_bits: Callable[[float], float], *, budget_bits: float) -> float:
    """Return the relative step at which `modelled_bits` (falling) meets the budget.

    Looks first around the steps that training uses and brackets from there; the rate
    is close to a power of the step between two of them, so few looks are needed.
    """
    if budget_bits <= 0:
        return HIGHEST_STEP
    target = math.log(budget_bits)
    low, high = 1.0, 2.0
    at_low, at_high = _log_bits(modelled_bits, low), _log_bits(modelled_bits, high)
    while at_low < target and low > LOWEST_STEP:
        low, high, at_high = low / 2, low, at_low
        at_low = _log_bits(modelled_bits, low)
    while at_high > target and high < HIGHEST_STEP:
        low, high, at_low = high, high * 2, at_high
        at_high = _log_bits(modelled_bits, high)
    for _ in range(_SEARCH_STEPS):
        if at_low <= target or high / low < 1.01:
            return low
        if at_high >= target:
            return high
        share = (at_low - target) / (at_low - at_high)
        middle: float = low * (high / low) ** min(max(share, 0.1), 0.9)
        at_middle = _log_bits(modelled_bits, middle)
        if at_middle > target:
            low, at_low = middle, at_middle
        else:
            high, at_high = middle, at_middle
        if abs(at_middle - target) < 0.01:
            return middle
    return math.sqrt(low * high)


def _log_bits(modelled_bits: Callable[[float], float], step: float) -> float:
    return math.log(max(modelled_bits(step), 1e-9))
