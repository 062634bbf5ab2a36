"""Choose, for each tensor of a bucket: its form, its step and the size of its chunks.

The form is small floats, blocks of n x n, or no transform, whichever samples show to be
cheapest in rate and error together. The step follows from the tensor's rms, or from a budget
of bits (`codec/rate.py`).

A backend makes a `Question` of a bucket once, measures its samples at one step or several,
and has it answered. Nothing is coded meanwhile, on any thread or GPU, and NumPy takes longer
over a few tensors than a processor over all of their values. So this is compiled, as one walk
over the tensors; `tests/unit/codec/dct/test_choice.py` says the same in NumPy.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from shoestring.codec.base import Layout
from shoestring.codec.dct import format as fmt
from shoestring.codec.dct.options import Options
from shoestring.codec.dct.steps import MAX_STEPS, ROUNDING
from shoestring.codec.rate import MARGINAL_GAIN
from shoestring.compiled.jit import decode_jit, making_jit

Floats = NDArray[np.float64]
Headers = NDArray[np.void]

# The transform must win by this much: codes of plain values cluster more than a short sample shows.
ADVANTAGE = 0.97
DEFAULT_BLOCK = 8
# Bits of a chunk besides its codes: header, states, end.
CHUNK_OVERHEAD_BITS = 72
# Tensors whose steps could leave the range of exponents.
TOO_SMALL, TOO_LARGE, TOO_LARGE_FOR_HALF = 2.0**-80, 2.0**90, 2.0**110
# Values that are all +a or -a are coded with a step of a: a sign each, and hardly anything else.
FLAT_BITS = 1.03
# The squared error of a uniform quantiser, in steps squared.
STEP_ERROR = 1 / 12
# Rounding a value to its grid changes it by less than this.
_SNAPPED = 2.0**-10

# Constants of `format.py` under plain names, as compiled code needs them.
_ZERO, _HALF, _FULL, _PLAIN = fmt.ZERO, fmt.HALF, fmt.FULL, fmt.kind_of_block(1)
_CODED = -1
_MIN_CHUNK = fmt.MIN_CHUNK_LOG2
_LOW, _HIGH = fmt.MIN_MANTISSA, fmt.MAX_MANTISSA
_THRESHOLD = 1 - float(ROUNDING)


@dataclass(frozen=True)
class Chunking:
    """How long the chunks of a backend are."""

    bits: (
        int  # of a chunk, about: long enough to make headers cheap, short enough to code many chunks at once
    )
    most_log2: int


@dataclass(frozen=True, eq=False)
class Question:
    """Everything a choice depends on besides the values; made once a layout. Equal only to itself."""

    options: Options
    wanted: tuple[tuple[int, int], ...]  # a sample each: a tensor and a block size
    tensor: NDArray[np.int64]  # of each sample
    sizes: NDArray[np.int64]
    first_sample: NDArray[np.int64]  # of each tensor, or -1: too small for blocks
    kinds: NDArray[np.uint8]  # of each sample
    handicap: Floats
    forms: int
    values: int

    @property
    def _arrays(self) -> tuple[object, ...]:
        is_full = self.options.small_as == "float32"
        return self.sizes, self.first_sample, self.kinds, self.handicap, self.forms, is_full

    def budget(self, largest: Floats, chunking: Chunking) -> tuple[float, int]:
        """Return the bits that remain for codes, and the number of values to be coded."""
        spent, values = _outline(*self._arrays, largest)
        allowed = (self.options.bits or 0.0) * self.values
        return (allowed - spent) / (1 + CHUNK_OVERHEAD_BITS / chunking.bits), values

    def modelled_bits(self, energy: Floats, largest: Floats, relative: float, costs: Floats) -> float:
        """Return how many bits all codes take at a step over rms; `costs` are [bits, errors] of samples."""
        bits: float = _total(*self._arrays, energy, largest, relative, costs[0], costs[1])
        return bits

    def answer(
        self,
        energy: Floats,
        largest: Floats,
        step: float,
        relative: Floats,
        costs: Floats,
        chunking: Chunking,
    ) -> tuple[Headers, float]:
        """Return the tensor headers for a step over rms, and about how many bits the stream will take.

        `costs` are [bits, errors] a value of [samples, relative steps]. A bucket with a value that is
        not finite would take infinitely many bits.
        """
        headers = np.zeros(self.sizes.size, fmt.TENSOR)
        chunks = chunking.bits, chunking.most_log2, headers.view(np.uint8).reshape(-1, 4)
        if relative.size == 1:
            at_step = np.ascontiguousarray(costs[..., 0])
            bits = _choose_at(*self._arrays, energy, largest, step, at_step[0], at_step[1], *chunks)
        else:
            bits = _choose(*self._arrays, energy, largest, step, relative, costs[0], costs[1], *chunks)
        return headers, bits

    def step_for_budget(
        self, energy: Floats, largest: Floats, budget: float, relative: Floats, costs: Floats
    ) -> tuple[float, bool]:
        """Return the step over rms that meets a budget, and whether it lies between those of `costs`."""
        step, is_met = _step_for_budget(*self._arrays, energy, largest, budget, relative, costs[0], costs[1])
        return step, is_met


@lru_cache(maxsize=1024)  # a large model has hundreds of parts
def ask(layout: Layout, options: Options) -> Question:
    large = [index for index, size in enumerate(layout.sizes) if size >= max(options.small, 1)]
    wanted = tuple(list_wanted(layout, options, large))
    forms = len(wanted) // max(len(large), 1)
    first = np.full(len(layout.sizes), -1, np.int64)
    first[large] = forms * np.arange(len(large))
    sides = [n for _, n in wanted]
    return Question(
        options=options,
        wanted=wanted,
        tensor=np.array([index for index, _ in wanted], np.int64),
        sizes=np.array(layout.sizes, np.int64),
        first_sample=first,
        kinds=np.array([fmt.kind_of_block(n) for n in sides], np.uint8),
        handicap=np.array([ADVANTAGE if n > 1 else 1.0 for n in sides]),
        forms=forms,
        values=layout.total,
    )


def list_wanted(layout: Layout, options: Options, tensors: Sequence[int]) -> list[tuple[int, int]]:
    """Pair each tensor with the block sizes it may be coded with, as many for each."""
    return [
        (index, n if layout.sizes[index] >= n * n else 1)
        for index in tensors
        for n in candidates(layout.shapes[index], options)
    ]


def candidates(shape: tuple[int, ...], options: Options) -> list[int]:
    """List the block sizes that a tensor may be coded with; 1 is no transform."""
    block = options.block or natural_block(shape, DEFAULT_BLOCK)
    return {"auto": [1, block], "always": [block], "never": [1]}[options.transform]


def natural_block(shape: tuple[int, ...], default: int) -> int:
    """Return the block that fits a tensor: its kernel, if it is a square convolution."""
    if len(shape) >= 4 and shape[-1] == shape[-2] and shape[-1] in fmt.BLOCKS and shape[-1] > 1:
        return shape[-1]
    return default


@decode_jit
def is_coded(largest):
    """Say whether a tensor that is large enough for blocks is coded, by its largest magnitude."""
    return TOO_SMALL <= largest <= TOO_LARGE


@decode_jit
def _part(first_sample, is_full, largest):
    """Return the kind of a tensor that is not coded, or _CODED."""
    small = first_sample < 0
    if largest < TOO_SMALL:  # nothing is sent, all is left over
        return _ZERO
    if largest > (TOO_LARGE_FOR_HALF if small else TOO_LARGE) or (small and is_full):
        return _FULL
    return _HALF if small else _CODED


@decode_jit
def _outline(sizes, first_sample, kinds, handicap, forms, is_full, largest):
    spent, coded = 0.0, 0
    for t in range(sizes.size):
        part = _part(first_sample[t], is_full, largest[t])
        if part == _CODED:
            coded += sizes[t]
        elif part != _ZERO:
            spent += (16.0 if part == _HALF else 32.0) * sizes[t]
    return spent, coded


@decode_jit
def _nearest(step):
    """Return the mantissa and exponent of the nearest step that can be sent."""
    fraction, exponent = math.frexp(step)
    mantissa = int(np.rint(fraction * 2 * _LOW))
    if mantissa > _HIGH:
        return _LOW, exponent - 4
    return mantissa, exponent - 5


@decode_jit
def _is_flat(size, energy, largest, relative):
    """Say whether a step as large as the rms leaves no more error than the relative one would.

    So it is with values that are all +a or -a: finer steps would tell nothing new.
    """
    if relative >= 1:
        return False
    rms = math.sqrt(energy / size)
    mantissa, exponent = _nearest(rms)
    off = math.ldexp(float(mantissa), exponent) / rms - 1
    allowed = STEP_ERROR * relative * relative
    return off * off <= allowed and size * largest * largest - energy <= allowed * energy


@decode_jit
def _weight(bits):
    """Return what a bit is worth in squared error (in steps squared), at about this rate.

    A code takes about 3 bits for its sign and level and log2(1 / p) for its place; it
    stands at a share p of the places that is about a sixth of the rate.
    """
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
def _total(sizes, first_sample, kinds, handicap, forms, is_full, energy, largest, relative, bits, errors):
    total = 0.0
    for t in range(sizes.size):
        first = first_sample[t]
        if _part(first, is_full, largest[t]) != _CODED:
            continue
        if kinds[first] == _PLAIN and _is_flat(sizes[t], energy[t], largest[t], relative):
            total += sizes[t] * FLAT_BITS
        else:
            total += sizes[t] * bits[_best(bits, errors, handicap, first, forms)]
    return total


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


@making_jit
def _step_for_budget(
    sizes, first_sample, kinds, handicap, forms, is_full, energy, largest, budget, relative, bits, errors
):
    steps = relative.size
    if budget <= 0:
        return relative[steps - 1], False
    places, least = np.empty(steps), np.inf
    for k in range(steps):
        total = _total(
            sizes, first_sample, kinds, handicap, forms, is_full, energy, largest, relative[k], bits[:, k],
            errors[:, k],
        )  # fmt: skip
        least = min(least, math.log(max(total, 1e-9)))
        places[k] = -least
    wanted = -math.log(budget)
    is_met = places[0] <= wanted <= places[steps - 1]
    return math.exp(_interpolate(wanted, places, np.log(relative))), is_met


@making_jit
def _choose_at(
    sizes, first_sample, kinds, handicap, forms, is_full, energy, largest, step, bits, errors, chunk_bits,
    most_log2, headers,
):  # fmt: skip
    """Write all headers, from the costs of samples at the chosen step."""
    spent, coded, total = 0.0, 0, 0.0
    rates = np.zeros(sizes.size)
    for t in range(sizes.size):
        if not np.isfinite(largest[t]):
            return np.inf
        first = first_sample[t]
        part = _part(first, is_full, largest[t])
        if part != _CODED:
            headers[t, 0] = part
            if part == _HALF:  # the largest lands in [2**14, 2**15)
                headers[t, 3] = np.uint8((math.frexp(largest[t])[1] - 15) & 255)
            if part != _ZERO:
                spent += (16.0 if part == _HALF else 32.0) * sizes[t]
            continue
        rms = math.sqrt(energy[t] / sizes[t])
        if kinds[first] == _PLAIN and _is_flat(sizes[t], energy[t], largest[t], step):
            best, rates[t], own_step = first, FLAT_BITS, rms
        else:
            best = _best(bits, errors, handicap, first, forms)
            rates[t], own_step = bits[best], step * rms
        mantissa, exponent = _nearest(max(own_step, largest[t] / MAX_STEPS))
        sent_step = math.ldexp(float(mantissa), exponent)
        if kinds[best] == _PLAIN and largest[t] * (1 + _SNAPPED) < _THRESHOLD * sent_step:
            rates[t] = 0.0  # no code would be other than zero
            continue
        headers[t, 0], headers[t, 2], headers[t, 3] = kinds[best], mantissa, np.uint8(exponent & 255)
        coded += sizes[t]
        total += sizes[t] * rates[t]
    for t in range(sizes.size):
        if headers[t, 2]:
            # One sample may be far off, and its chunks many times too long: half way to the mean.
            rate = math.sqrt(max(rates[t], 1e-6) * max(total / coded, 1e-6))
            log2 = int(np.rint(math.log2(chunk_bits / rate)))
            headers[t, 1] = min(max(log2, _MIN_CHUNK), most_log2)
    return spent + total * (1 + CHUNK_OVERHEAD_BITS / chunk_bits)


@making_jit
def _choose(
    sizes, first_sample, kinds, handicap, forms, is_full, energy, largest, step, relative, bits, errors,
    chunk_bits, most_log2, headers,
):  # fmt: skip
    """The same from costs at several steps: between two the rate is close to a power of the step."""
    count = relative.size
    bits = bits + 1e-9
    place = _interpolate(math.log2(step), np.log2(relative), np.arange(count, dtype=np.float64))
    left = min(int(place), max(count - 2, 0))
    right = min(left + 1, count - 1)
    share = place - left
    own_bits = np.exp2(np.log2(bits[:, left]) * (1 - share) + np.log2(bits[:, right]) * share)
    own_errors = errors[:, left] * (1 - share) + errors[:, right] * share
    return _choose_at(
        sizes, first_sample, kinds, handicap, forms, is_full, energy, largest, step, own_bits, own_errors,
        chunk_bits, most_log2, headers,
    )  # fmt: skip
