"""Choose, for each tensor of a bucket: its form, its step and the size of its chunks.

The form is small floats, blocks of n x n, or no transform, whichever the sample shows
to be cheapest in rate and error together. The step follows from the tensor's rms, or
from a budget of bits (`codec/rate.py`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from shoestring.codec.base import Layout
from shoestring.codec.dct import format as stream
from shoestring.codec.dct.options import Options
from shoestring.codec.dct.steps import MAX_STEPS, nearest
from shoestring.codec.rate import common_step, rate_weight, step_on_curve, typical_step

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Wanted = Sequence[tuple[int, int]]  # pairs of a tensor and a block size

# A chunk of about this many bits: long enough for its header to be nothing, short
# enough for many to be coded at once.
CHUNK_BITS = 8192
# The transform must win by this much: codes of plain values cluster more than a short sample shows.
ADVANTAGE = 0.97
DEFAULT_BLOCK = 8
# What a chunk takes besides its codes: header, states, end.
CHUNK_OVERHEAD_BITS = 72
# Tensors whose steps could leave the range of exponents.
TOO_SMALL, TOO_LARGE, TOO_LARGE_FOR_HALF = 2.0**-80, 2.0**90, 2.0**110

_KIND_OF_SIDE = np.zeros(max(stream.BLOCKS) + 1, np.uint8)
for _side in stream.BLOCKS:
    _KIND_OF_SIDE[_side] = stream.kind_of_block(_side)


class Samples(Protocol):
    """Samples of tensors in some forms."""

    def costs(self, relative_step: float) -> tuple[Floats, Floats]:
        """Return the bits, and the squared error in steps squared, a value of each sample.

        The step of each is `relative_step` times its tensor's rms.
        """
        ...

    def table(self) -> tuple[Floats, Floats, Floats] | None:
        """Return (relative steps, bits, errors) if all that can be asked is known already."""
        ...


def plan(
    layout: Layout,
    options: Options,
    energy: Floats,
    largest: Floats,
    sample: Callable[[Wanted, Floats], Samples],
    chunk_bits: int = CHUNK_BITS,
) -> tuple[NDArray[np.void], Floats]:
    """Return the tensor headers, and about how many bits a value each tensor will take.

    `sample` takes all wanted pairs of tensor and block size, and the rms of every tensor.
    """
    tensors = _tensors(layout, options)
    sizes = tensors.sizes
    headers = np.zeros(sizes.size, stream.TENSOR)
    bits_a_value = np.zeros(sizes.size)
    sent = largest >= TOO_SMALL  # of smaller ones nothing is sent and all is kept
    full = sent & (tensors.is_full | (largest > tensors.limit))
    half = sent & tensors.is_small & ~full
    headers["kind"] = np.where(half, stream.HALF, full * stream.FULL)
    # The largest lands in [2**14, 2**15).
    headers["exponent"] = half * (np.frexp(largest)[1] - 15)
    coded = np.flatnonzero(sent & ~half & ~full)
    if not coded.size:
        return headers, bits_a_value

    rms = np.sqrt(energy / tensors.counted)
    wanted, sides, handicap = _forms(layout, options, tuple(coded.tolist()))
    samples = sample(wanted, rms)
    rows = np.arange(coded.size)

    def best(bits: Floats, error: Floats, handicap: Floats) -> Ints:
        """Choose each tensor's form; costs are [coded, forms], or [coded, forms, steps]."""
        weight = rate_weight(bits.sum(axis=1, keepdims=True) / bits.shape[1])
        form: Ints = np.argmin((error + weight * bits) * handicap, axis=1)
        return form

    def at(relative: float) -> tuple[Ints, Floats]:
        bits, error = (costs.reshape(sides.shape) for costs in samples.costs(relative))
        form = best(bits, error, handicap)
        return form, bits[rows, form]

    relative = options.step
    if options.bits is not None:
        at = cache(at)  # the step that is chosen has often been looked at
        spent = 32.0 * sizes[full].sum() + 16.0 * sizes[half].sum()
        budget = (options.bits * layout.total - spent) / (1 + CHUNK_OVERHEAD_BITS / chunk_bits)
        table = samples.table()
        if table is None:
            relative = common_step(
                lambda step: float(sizes[coded] @ at(step)[1]),
                budget_bits=budget,
                start=typical_step(budget / sizes[coded].sum()),
            )
        else:
            steps, *costs = table
            bits, error = (each.reshape(*sides.shape, -1) for each in costs)
            form = best(bits, error, handicap[..., None])
            total = sizes[coded] @ np.take_along_axis(bits, form[:, None], axis=1)[:, 0]
            relative = step_on_curve(steps, total, budget_bits=budget)
    form, bits_a_value[coded] = at(relative)
    step = np.maximum(relative * rms[coded], largest[coded] / MAX_STEPS)
    headers["kind"][coded] = _KIND_OF_SIDE[sides[rows, form]]
    headers["chunk_log2"][coded] = chunk_log2(bits_a_value[coded], chunk_bits)
    headers["mantissa"][coded], headers["exponent"][coded] = nearest(step)
    return headers, bits_a_value


@dataclass(frozen=True)
class _Tensors:
    """What is known of a bucket's tensors before their values are."""

    sizes: Ints
    counted: Ints  # the same, but at least 1
    is_small: NDArray[np.bool_]
    is_full: NDArray[np.bool_]  # small, and wanted as float32
    limit: Floats  # larger values can only be sent as float32


@lru_cache(maxsize=1024)  # a large model has hundreds of parts
def _tensors(layout: Layout, options: Options) -> _Tensors:
    sizes = np.array(layout.sizes, np.int64)
    is_small = sizes < options.small
    limit = np.where(is_small, TOO_LARGE_FOR_HALF, TOO_LARGE)
    return _Tensors(sizes, np.maximum(sizes, 1), is_small, is_small & (options.small_as == "float32"), limit)


@lru_cache(maxsize=1024)
def _forms(
    layout: Layout, options: Options, coded: tuple[int, ...]
) -> tuple[tuple[tuple[int, int], ...], Ints, Floats]:
    """Return the wanted pairs of these tensors; as [coded, forms] their sides, and what each must win by."""
    wanted = tuple(list_wanted(layout, options, coded))
    sides = np.array([n for _, n in wanted]).reshape(len(coded), -1)
    return wanted, sides, np.where(sides > 1, ADVANTAGE, 1.0)


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
    if len(shape) >= 4 and shape[-1] == shape[-2] and shape[-1] in stream.BLOCKS and shape[-1] > 1:
        return shape[-1]
    return default


def chunk_log2(bits_a_value: Floats, chunk_bits: int = CHUNK_BITS) -> NDArray[np.int64]:
    """Return the log2 of the chunk sizes that give about `chunk_bits`."""
    wanted = np.rint(np.log2(chunk_bits / np.maximum(bits_a_value, 1e-6)))
    fitting = np.minimum(np.maximum(wanted, stream.MIN_CHUNK_LOG2), stream.MAX_CHUNK_LOG2)
    return fitting.astype(np.int64)
