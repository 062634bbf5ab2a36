"""Measure a bucket on the CPU: what an encoder must know before it chooses.

`scan` reads everything once (energy, largest magnitude, NaN). `costs` transforms a few
groups of blocks of each tensor and says how many bits the real coder would take for them
at a step and how much error would be left: true costs on true codes, so that a choice
between transforms or steps needs no second encoding.
"""

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoestring.codec.base import Layout, Vector
from shoestring.codec.dct.entropy import cheapest_table, symbol_of
from shoestring.codec.dct.format import MAX_LEVEL
from shoestring.codec.dct.jit import Kernel, encode_jit, specialise, sum_jit
from shoestring.codec.dct.sampling import lanes_of, sample_shape
from shoestring.codec.dct.scratch import room, run_parts
from shoestring.codec.dct.steps import ROUNDING
from shoestring.codec.dct.tables import COST_ONE_BIT, EXTRA, SYMBOLS, TABLES
from shoestring.codec.dct.transform import forward_group, trailing_zeros

Floats = NDArray[np.float64]

_NON_FINITE = np.int32(0x7F800000)
_MAGNITUDE = np.int32(0x7FFFFFFF)
_SEGMENT = 1 << 16


@sum_jit
def _scan(values, bits, starts, sizes, energy, top):
    for k in range(starts.size):
        own = values[starts[k] : starts[k] + sizes[k]]
        own_bits = bits[starts[k] : starts[k] + sizes[k]]
        total = 0.0
        largest = np.int32(0)
        for i in range(own.size):
            value = np.float64(own[i])
            total += value * value
            largest = max(largest, own_bits[i] & _MAGNITUDE)
        energy[k] = total
        top[k] = largest


@cache
def _segments(layout: Layout) -> tuple[NDArray[np.int64], ...]:
    """Cut all tensors into segments: (first segment of each tensor that has any, starts, sizes)."""
    begins: list[int] = []
    starts: list[int] = []
    sizes: list[int] = []
    for offset, size in zip(layout.offsets, layout.sizes, strict=False):
        if size:
            begins.append(len(starts))
        for first in range(0, size, _SEGMENT):
            starts.append(offset + first)
            sizes.append(min(_SEGMENT, size - first))
    return tuple(np.array(column, np.int64) for column in (begins, starts, sizes))


def scan(values: Vector, layout: Layout, threads: int) -> tuple[Floats, Floats, int]:
    """Return each tensor's energy and largest magnitude, and the first that is not finite or -1."""
    energy, largest = np.zeros(len(layout.sizes)), np.zeros(len(layout.sizes), np.int32)
    if not layout.total:
        return energy, largest.astype(np.float64), -1
    begins, starts, sizes = _segments(layout)
    sums, tops = np.empty(starts.size), np.empty(starts.size, np.int32)
    bits = values.view(np.int32)

    def scan_part(part: slice) -> None:
        _scan(values, bits, starts[part], sizes[part], sums[part], tops[part])

    run_parts(threads, scan_part, _parts(starts.size, threads))
    filled = np.flatnonzero(layout.sizes)
    energy[filled] = np.add.reduceat(sums, begins)
    largest[filled] = np.maximum.reduceat(tops, begins)
    bad = np.flatnonzero(largest >= _NON_FINITE)
    return energy, largest.view(np.float32).astype(np.float64), int(bad[0]) if bad.size else -1


def _parts(count: int, threads: int) -> list[slice]:
    each = max(1, -(-count // threads))
    return [slice(first, first + each) for first in range(0, count, each)]


# Stand for a block's area and the transform of its size (`specialise`).
area = 0
transform = None


def _gather(x, groups, runs, each, coefficients, run, s):
    """Transform `groups` groups of blocks, each of some runs from all over the tensor."""
    lanes = runs * each
    apart = max(groups * runs - 1, 1)
    for g in range(groups):
        for r in range(runs):
            first = (g * runs + r) * (x.size // area - each) // apart
            run[r * each * area : (r + 1) * each * area] = x[first * area : (first + each) * area]
        transform(run, 0, lanes, np.float32(0), s)
        for f in range(area):
            row = coefficients[(g * area + f) * lanes : (g * area + f + 1) * lanes]
            for b in range(lanes):
                row[b] = s[f, b]


@encode_jit
def _cost(coefficients, step, flags, flag_words, histograms, table_costs):
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
    gap_cost = table_costs[cheapest_table(histograms[0], table_costs)]
    level_cost = table_costs[cheapest_table(histograms[1], table_costs)]
    return bits + np.float64(gap_cost + level_cost) / COST_ONE_BIT, max(error, 0.0)


gather = None


def _measure(values, starts, sizes, shapes, steps, room_for, results):
    """Write (bits, squared error in steps), both a value, of each tensor's sample."""
    coefficients, run, s, flags, flag_words, histograms, table_costs = room_for
    for k in range(starts.size):
        x = values[starts[k] : starts[k] + sizes[k]]
        own = coefficients[: shapes[k, 0] * shapes[k, 1] * shapes[k, 2] * area]
        gather(x, shapes[k, 0], shapes[k, 1], shapes[k, 2], own, run, s)
        bits, error = _cost(own, steps[k], flags, flag_words, histograms, table_costs)
        results[k, 0] = bits / own.size
        results[k, 1] = error / own.size


@cache
def _measurer(n: int) -> Kernel:
    gatherer = specialise(encode_jit, _gather, n, area=n * n, transform=forward_group(n))
    return specialise(encode_jit, _measure, n, area=n * n, gather=gatherer)


def _room_for(n: int, most: int) -> tuple[Any, ...]:
    group = n * n * lanes_of(n)
    flags = room("sample_flags", most + 8, np.uint8)
    return (
        room("sample", most, np.float32),
        room("sample_run", group, np.float32),
        room("sample_group", group, np.float32)[:group].reshape(n * n, -1),
        flags,
        flags[: flags.size // 8 * 8].view(np.uint64),
        room("sample_histograms", 2 * SYMBOLS, np.int32).reshape(2, SYMBOLS),
        room("sample_costs", TABLES, np.int32),
    )


def costs(
    values: Vector, layout: Layout, wanted: list[tuple[int, int]], steps: Floats, threads: int
) -> tuple[Floats, Floats]:
    """Return the bits, and the squared error in steps squared, a value, of each (tensor, n) at its step."""
    results = np.zeros((len(wanted), 2))
    sides = np.array([n for _, n in wanted])
    starts = np.array([layout.offsets[index] for index, _ in wanted], np.int64)
    sizes = np.array([layout.sizes[index] for index, _ in wanted], np.int64)
    shapes = np.array([sample_shape(layout.sizes[index], n) for index, n in wanted], np.int64)
    blocks = shapes.prod(axis=1)
    parts = []
    for n in np.unique(sides).tolist():
        chosen = np.flatnonzero((sides == n) & (blocks > 0))
        parts += [(n, chosen[part]) for part in _parts(chosen.size, threads)]

    def measure_part(part: tuple[int, NDArray[np.int64]]) -> None:
        n, own = part
        found = np.empty((own.size, 2))
        memory = _room_for(n, int(blocks[own].max()) * n * n)
        _measurer(n)(values, starts[own], sizes[own], shapes[own], steps[own], memory, found)
        results[own] = found

    run_parts(threads, measure_part, parts)
    return results[:, 0], results[:, 1]
