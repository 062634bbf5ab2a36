"""What `plan.plan` and `steps.of_headers` say, for a bucket whose costs are known at some steps.

The GPU waits while a bucket is planned, and NumPy takes longer over a few tensors than the
GPU over all of their values. So the same arithmetic is compiled here as one walk over the
tensors; `tests/kernels/test_choice.py` holds it to what `plan` chooses.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from shoestring.codec.base import Layout
from shoestring.codec.dct import format as stream
from shoestring.codec.dct.jit import decode_jit
from shoestring.codec.dct.options import Options
from shoestring.codec.dct.plan import (
    ADVANTAGE,
    CHUNK_OVERHEAD_BITS,
    TOO_LARGE,
    TOO_LARGE_FOR_HALF,
    TOO_SMALL,
    Floats,
    list_wanted,
)
from shoestring.codec.dct.steps import MAX_STEPS, ROUNDING
from shoestring.codec.rate import MARGINAL_GAIN

# A quarter of the CPU's: more chunks walk in step, each for a quarter as long.
CHUNK_BITS = 2048
# An item of a chunk's list has 16 bits for its place.
MOST_CHUNK_LOG2 = 16
STEP_COLUMNS = 8
# What plain numbers are called in compiled code.
_ZERO, _HALF, _FULL = stream.ZERO, stream.HALF, stream.FULL
_MIN_CHUNK, _GRID = stream.MIN_CHUNK_LOG2, stream.GRID_LOG2
_LOW, _HIGH = stream.MIN_MANTISSA, stream.MAX_MANTISSA
_MIN_EXPONENT, _MAX_EXPONENT = stream.MIN_EXPONENT, stream.MAX_EXPONENT
_ROUNDING = float(ROUNDING)


@dataclass(frozen=True)
class Question:
    """What a plan depends on beside the values: made once a layout and kept."""

    wanted: tuple[tuple[int, int], ...]
    sizes: NDArray[np.int64]
    first_sample: NDArray[np.int64]  # of each tensor, or -1: too small for blocks
    kinds: NDArray[np.uint8]  # of each sample
    handicap: Floats
    forms: int


@lru_cache(maxsize=1024)  # a large model has hundreds of parts
def ask(layout: Layout, options: Options) -> Question:
    large = [index for index, size in enumerate(layout.sizes) if size >= options.small]
    wanted = tuple(list_wanted(layout, options, large))
    forms = len(wanted) // max(len(large), 1)
    first = np.full(len(layout.sizes), -1, np.int64)
    first[large] = forms * np.arange(len(large))
    sides = [n for _, n in wanted]
    return Question(
        wanted=wanted,
        sizes=np.array(layout.sizes, np.int64),
        first_sample=first,
        kinds=np.array([stream.kind_of_block(n) for n in sides], np.uint8),
        handicap=np.array([ADVANTAGE if n > 1 else 1.0 for n in sides]),
        forms=forms,
    )


def answer(
    question: Question, options: Options, energy: Floats, largest: Floats, relative: Floats, costs: Floats
) -> tuple[NDArray[np.void], float, bool]:
    """Return the tensor headers, about how many bits the stream will take, and whether that is enough.

    It is if there is no budget, or if the budget is met within the range of steps. A bucket with a value
    that is not finite would take infinitely many.

    `costs` are [bits, errors] a value of [samples, steps].
    """
    headers = np.zeros(question.sizes.size, stream.TENSOR)
    bits, is_met = _choose(
        question.sizes, question.first_sample, question.kinds, question.handicap, question.forms, energy,
        largest, relative, costs[0], costs[1], options.step, -1.0 if options.bits is None else options.bits,
        options.small_as == "float32", headers.view(np.uint8).reshape(-1, 4),
    )  # fmt: skip
    return headers, bits, is_met


def find_steps(headers: NDArray[np.void], largest: Floats | None, steps: NDArray[np.float32]) -> None:
    """Fill [tensors, 8] with inverse, threshold, magic, mantissa and scale; see `steps.Steps`."""
    known = largest is not None
    _find_steps(headers.view(np.uint8).reshape(-1, 4), largest if known else _NONE, known, steps)


_NONE = np.zeros(0)


@decode_jit
def _weight(bits):
    share = min(max(bits / 6, 1e-6), 0.5)
    return MARGINAL_GAIN / (3 - math.log2(share))


@decode_jit
def _best(bits, errors, handicap, first, forms):
    """Return the cheapest of a tensor's forms, in rate and error together."""
    mean = 0.0
    for k in range(first, first + forms):
        mean += bits[k]
    weight = _weight(mean / forms)
    best, least = first, np.inf
    for k in range(first, first + forms):
        loss = (errors[k] + weight * bits[k]) * handicap[k]
        if loss < least:
            best, least = k, loss
    return best


@decode_jit
def _interpolate(x, places, values):
    """Return the value at x, as `numpy.interp` does: places do not fall."""
    last = places.size - 1
    if x >= places[last]:
        return values[last]
    if x < places[0]:
        return values[0]
    k = np.searchsorted(places, x, side="right") - 1
    return values[k] + (values[k + 1] - values[k]) / (places[k + 1] - places[k]) * (x - places[k])


@decode_jit
def _step_for_budget(budget, sizes, first_sample, coded, handicap, forms, relative, bits, errors):
    """Return the step over rms at which all tensors in their cheapest forms take `budget` bits.

    And whether it lies in the range.
    """
    steps = relative.size
    if budget <= 0:
        return relative[steps - 1], False
    places, least = np.empty(steps), np.inf
    for k in range(steps):
        total = 0.0
        for t in range(sizes.size):
            if coded[t]:
                best = _best(bits[:, k], errors[:, k], handicap, first_sample[t], forms)
                total += sizes[t] * bits[best, k]
        least = min(least, math.log(max(total, 1e-9)))
        places[k] = -least
    wanted = -math.log(budget)
    is_met = places[0] <= wanted <= places[steps - 1]
    return math.exp(_interpolate(wanted, places, np.log(relative))), is_met


@decode_jit
def _choose(
    sizes, first_sample, kinds, handicap, forms, energy, largest, relative, bits, errors, step, budget,
    small_is_full, headers,
):  # fmt: skip
    bits = bits + 1e-9
    coded = np.zeros(sizes.size, np.bool_)
    spent, any_coded = 0.0, False
    for t in range(sizes.size):
        small = first_sample[t] < 0
        if not np.isfinite(largest[t]):
            return np.inf, True
        if largest[t] < TOO_SMALL:  # nothing is sent and all is kept
            continue
        if largest[t] > (TOO_LARGE_FOR_HALF if small else TOO_LARGE) or (small and small_is_full):
            headers[t, 0] = _FULL
            spent += 32.0 * sizes[t]
        elif small:
            headers[t, 0] = _HALF
            headers[t, 3] = np.uint8(
                (math.frexp(largest[t])[1] - 15) & 255
            )  # the largest lands in [2**14, 2**15)
            spent += 16.0 * sizes[t]
        else:
            coded[t] = any_coded = True
    if not any_coded:
        return spent, True
    is_met = True
    overhead = 1 + CHUNK_OVERHEAD_BITS / CHUNK_BITS
    if budget > 0:
        free = (budget * sizes.sum() - spent) / overhead
        step, is_met = _step_for_budget(
            free, sizes, first_sample, coded, handicap, forms, relative, bits, errors
        )

    # Between two steps the rate is close to a power of the step.
    count = relative.size
    place = _interpolate(math.log2(step), np.log2(relative), np.arange(count, dtype=np.float64))
    left = min(int(place), max(count - 2, 0))
    right = min(left + 1, count - 1)
    share = place - left
    own_bits = np.exp2(np.log2(bits[:, left]) * (1 - share) + np.log2(bits[:, right]) * share)
    own_errors = errors[:, left] * (1 - share) + errors[:, right] * share
    best = np.zeros(sizes.size, np.int64)
    values, total = 0.0, 0.0
    for t in range(sizes.size):
        if coded[t]:
            best[t] = _best(own_bits, own_errors, handicap, first_sample[t], forms)
            values += sizes[t]
            total += sizes[t] * own_bits[best[t]]
    for t in range(sizes.size):
        if coded[t]:
            rms = math.sqrt(energy[t] / sizes[t])
            fraction, exponent = math.frexp(max(step * rms, largest[t] / MAX_STEPS))
            mantissa = int(np.rint(fraction * 2 * _LOW))
            exponent -= 5
            if mantissa > _HIGH:
                mantissa, exponent = _LOW, exponent + 1
            # One sample may be far off, and its chunks four times too long: half way to the mean.
            rate = math.sqrt(max(own_bits[best[t]], 1e-6) * max(total / values, 1e-6))
            log2 = int(np.rint(math.log2(CHUNK_BITS / rate)))
            headers[t, 0] = kinds[best[t]]
            headers[t, 1] = min(max(log2, _MIN_CHUNK), MOST_CHUNK_LOG2)
            headers[t, 2] = mantissa
            headers[t, 3] = np.uint8(exponent & 255)
    return spent + total * overhead, is_met


@decode_jit
def _find_steps(headers, largest, known, steps):
    for t in range(headers.shape[0]):
        mantissa = min(max(int(headers[t, 2]), _LOW), _HIGH)
        exponent = int(headers[t, 3])
        exponent = min(max(exponent - 256 if exponent > 127 else exponent, _MIN_EXPONENT), _MAX_EXPONENT)
        step = math.ldexp(float(mantissa), exponent)
        magic = 0.0
        if known:
            bound = 2 * min(largest[t], MAX_STEPS * step) + 32 * step
            magic = math.ldexp(1.5, math.frexp(bound)[1])
        steps[t, 0] = np.float32(1 / step)
        steps[t, 1] = np.float32((1 - _ROUNDING) * step)
        steps[t, 2] = np.float32(magic)
        steps[t, 3] = np.float32(mantissa)
        steps[t, 4] = np.float32(math.ldexp(1.0, exponent - _GRID))
