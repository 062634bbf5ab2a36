"""Measure a bucket on the CPU: what an encoder must know before it chooses.

`scan` reads everything once (energy, largest magnitude, NaN). `Sample` transforms a
few groups of blocks of a tensor once and then says, for any step, how many bits the
real coder would take for them and how much error would be left: true costs on true
codes, so that a choice between transforms or steps needs no second encoding.
"""

from functools import cache

import numpy as np
from numpy.typing import NDArray

from shoestring.codec.base import Layout, Vector
from shoestring.codec.dct.entropy import cheapest_table, symbol_of
from shoestring.codec.dct.format import MAX_LEVEL
from shoestring.codec.dct.jit import Kernel, encode_jit, sum_jit
from shoestring.codec.dct.scratch import room
from shoestring.codec.dct.steps import ROUNDING
from shoestring.codec.dct.tables import COST_ONE_BIT, EXTRA, SYMBOLS, TABLES
from shoestring.codec.dct.transform import forward_group, lanes_of, trailing_zeros

MAX_GROUPS = 8
VALUES_A_GROUP = 1 << 16  # a group of about 2,048 values stands for this many

_NON_FINITE = np.int32(0x7F800000)


@sum_jit
def _scan(values, bits, offsets, energy, largest):
    for tensor in range(offsets.size - 1):
        own = values[offsets[tensor] : offsets[tensor + 1]]
        own_bits = bits[offsets[tensor] : offsets[tensor + 1]]
        total = 0.0
        top = np.int32(0)
        for i in range(own.size):
            value = np.float64(own[i])
            total += value * value
            top = max(top, own_bits[i] & np.int32(0x7FFFFFFF))
        energy[tensor] = total
        largest[tensor] = top
        if top >= _NON_FINITE:
            return tensor
    return -1


def scan(values: Vector, layout: Layout) -> tuple[NDArray[np.float64], NDArray[np.float64], int]:
    """Return each tensor's energy and largest magnitude, and the first that is not finite or -1."""
    energy = np.zeros(len(layout.sizes))
    largest = np.zeros(len(layout.sizes), np.int32)
    offsets = np.array(layout.offsets, np.int64)
    bad = _scan(values, values.view(np.int32), offsets, energy, largest)
    return energy, largest.view(np.float32).astype(np.float64), int(bad)


@cache
def _gather(n: int) -> Kernel:
    area = n * n
    transform = forward_group(n)

    @encode_jit
    def gather(x, groups, lanes, coefficients, s):
        apart = max(groups - 1, 1)
        for g in range(groups):
            transform(x, g * (x.size // area - lanes) // apart, lanes, np.float32(0), s)
            for f in range(area):
                row = coefficients[(g * area + f) * lanes : (g * area + f + 1) * lanes]
                for b in range(lanes):
                    row[b] = s[f, b]

    return gather


@encode_jit
def _cost(coefficients, step, flags, flag_words, histograms, costs):
    """Return (bits, squared error in steps) of these coefficients in planar order."""
    inverse_step = np.float32(1 / step)
    threshold = np.float32((1 - ROUNDING) * step)
    for symbol in range(SYMBOLS):
        histograms[0, symbol] = 0
        histograms[1, symbol] = 0
    count = coefficients.size
    words = (count + 7) // 8
    flag_words[words - 1] = 0
    energy = np.float32(0)
    for i in range(count):
        exact = coefficients[i] * inverse_step
        flags[i] = abs(coefficients[i]) >= threshold
        energy += exact * exact
    error = np.float64(energy)
    bits = 0
    previous = -1
    for w in range(words):
        word = flag_words[w]
        while word:
            i = w * 8 + np.int64(trailing_zeros(word) >> np.uint64(3))
            word &= word - np.uint64(1)
            exact = np.float64(abs(coefficients[i]) * inverse_step)
            level = min(max(np.int64(exact + ROUNDING), 1), MAX_LEVEL)
            error += (exact - level) ** 2 - exact**2
            gap_symbol, level_symbol = symbol_of(i - previous - 1), symbol_of(level - 1)
            histograms[0, gap_symbol] += 1
            histograms[1, level_symbol] += 1
            bits += np.int64(EXTRA[gap_symbol]) + np.int64(EXTRA[level_symbol]) + 1
            previous = i
    gap_cost = costs[cheapest_table(histograms[0], costs)]
    level_cost = costs[cheapest_table(histograms[1], costs)]
    return bits + np.float64(gap_cost + level_cost) / COST_ONE_BIT, max(error, 0.0)


class Sample:
    """Some blocks of one tensor, transformed with one block size."""

    def __init__(self, x: Vector, n: int) -> None:
        area = n * n
        blocks = x.size // area
        lanes = min(lanes_of(n), blocks)
        groups = max(1, min(MAX_GROUPS, x.size // VALUES_A_GROUP))
        self._coefficients = np.empty(groups * lanes * area, np.float32)
        s = room("sample", area * lanes_of(n), np.float32)[: area * lanes_of(n)].reshape(area, -1)
        _gather(n)(x, groups, lanes, self._coefficients, s)

    def cost(self, step: float) -> tuple[float, float]:
        """Return (bits, squared error in units of step squared), both a value."""
        size = self._coefficients.size
        if size == 0:
            return 0.0, 0.0
        flags = room("sample_flags", size + 8, np.uint8)
        bits, error = _cost(
            self._coefficients,
            step,
            flags,
            flags[: flags.size // 8 * 8].view(np.uint64),
            room("sample_histograms", 2 * SYMBOLS, np.int32).reshape(2, SYMBOLS),
            room("sample_costs", TABLES, np.int32),
        )
        return bits / size, error / size
