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

# With a threshold of 1 - 11/32 steps, the smallest coefficient that gets a code removes this
# much squared error, in steps squared. Over the bits of a code it is the slope at the margin.
MARGINAL_GAIN = 1 - 2 * 11 / 32


LOWEST_STEP, HIGHEST_STEP = 2.0**-8, 2.0**10
_FARTHEST = math.log(4)  # that a step goes at once
_LEAST_REACH, _MOST_REACH = 0.15, 4.0  # how far a step must go for a change of the bits, both in logarithms
_LOOKS = 32


def typical_step(bits_a_value: float) -> tuple[float, float]:
    """Return about the relative step that gradients need for a rate: where a search may begin.

    And how far the logarithm of the step goes there for that of the rate.
    """
    if bits_a_value <= 0:
        return HIGHEST_STEP / 2, _LEAST_REACH
    if bits_a_value < 1:
        step, reach = 1.4 * bits_a_value**-0.6, 0.6
    else:
        step, reach = 1.4 * 2.0 ** (1 - bits_a_value), bits_a_value * math.log(2)
    return min(max(step, 2 * LOWEST_STEP), HIGHEST_STEP / 2), min(reach, _MOST_REACH)


def common_step(
    modelled_bits: Callable[[float], float], *, budget_bits: float, values: int, close: float = 0.01
) -> float:
    """Return the relative step at which `modelled_bits` (falling) of so many values meets the budget.

    Between two steps near each other the rate is close to a power of the step, so few looks are
    needed: each goes where the line through two others meets the budget, in logarithms, and so does
    the answer, from a look that is `close`. Once the budget lies between two looks, every other one
    halves what is left, so that a rate which falls off a cliff is found as well.
    """
    if budget_bits <= 0:
        return HIGHEST_STEP
    target = math.log(budget_bits)
    low, high = LOWEST_STEP, HIGHEST_STEP
    too_many = too_few = math.nan  # by how much the logarithm is off at `low` and `high`, once known
    step, reach = typical_step(budget_bits / values)
    before, between = (step, 0.0), 0
    for look in range(_LOOKS):
        off = _log_bits(modelled_bits, step) - target
        if before[1] != off and before[0] != step:
            reach = math.log(step / before[0]) / (before[1] - off)
            reach = min(max(reach, _LEAST_REACH), _MOST_REACH)
        if abs(off) < (close if look else close / 5):  # at the first look the reach is only a guess
            return min(max(step * math.exp(reach * off), low), high)
        before = (step, off)
        if off > 0:
            low, too_many = step, off
        else:
            high, too_few = step, off
        if high / low < 1.005:
            break
        if math.isnan(too_many + too_few):
            step *= math.exp(min(max(reach * off, -_FARTHEST), _FARTHEST))
            step = min(max(step, LOWEST_STEP), HIGHEST_STEP)
        else:
            between += 1
            step = low * (high / low) ** (too_many / (too_many - too_few) if between % 2 else 0.5)
    return high if high > LOWEST_STEP else low


def _log_bits(modelled_bits: Callable[[float], float], step: float) -> float:
    return math.log(max(modelled_bits(step), 1e-9))
