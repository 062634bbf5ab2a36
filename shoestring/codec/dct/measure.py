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
from shoestring.codec.dct.entropy import cheapest_table, extra_bits_of, symbol_of
from shoestring.codec.dct.jit import Kernel, encode_jit, specialise, sum_jit
from shoestring.codec.dct.lists import group_room, list_order, lister
from shoestring.codec.dct.sampling import lanes_of, sample_shape
from shoestring.codec.dct.scratch import room, run_parts
from shoestring.codec.dct.steps import ROUNDING
from shoestring.codec.dct.tables import COST_ONE_BIT, SYMBOLS, TABLES

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


# Stand for a block's area, the list of each frequency and the lister of its size (`specialise`).
area = 0
order = np.zeros(1, np.int64)
make_lists = None


@sum_jit
def _energy(x):
    total = np.float32(0)
    for i in range(x.size):
        total += x[i] * x[i]
    return np.float64(total)


def _measure(values, starts, sizes, shapes, steps, run, entries, counts, group, coder, results):
    """Write (bits, squared error in steps), both a value, of each tensor's sample.

    A sample is some groups of blocks, a group some runs of blocks from all over the tensor.
    Its codes are taken in planar order, group after group.
    """
    histograms, table_costs = coder
    for k in range(starts.size):
        x = values[starts[k] : starts[k] + sizes[k]]
        groups, runs, each = shapes[k, 0], shapes[k, 1], shapes[k, 2]
        lanes = runs * each
        apart = max(groups * runs - 1, 1)
        inverse_step = np.float32(1 / steps[k])
        threshold = np.float32((1 - ROUNDING) * steps[k])
        step = (inverse_step, threshold, np.float32(0), np.int32(0), np.float32(0))
        histograms[:] = 0
        bits = 0
        error = 0.0
        previous = -1
        for g in range(groups):
            for r in range(runs):
                first = (g * runs + r) * (x.size // area - each) // apart
                run[r * each * area : (r + 1) * each * area] = x[first * area : (first + each) * area]
            own = run[: lanes * area]
            error += _energy(own) * np.float64(inverse_step) ** 2
            error -= make_lists(own, lanes, step, lanes, entries, counts, group, False, own)
            for f in range(area):
                row = order[f] * lanes
                for i in range(counts[order[f]]):
                    entry = entries[row + i]
                    position = (g * area + f) * lanes + (entry >> 16)
                    gap, level = position - previous - 1, (entry & 0xFFFF) >> 1
                    histograms[0, symbol_of(gap)] += 1
                    histograms[1, symbol_of(level)] += 1
                    bits += np.int64(extra_bits_of(gap) + extra_bits_of(level)) + 1
                    previous = position
        gap_cost = table_costs[cheapest_table(histograms[0], table_costs)]
        level_cost = table_costs[cheapest_table(histograms[1], table_costs)]
        count = groups * lanes * area
        results[k, 0] = (bits + np.float64(gap_cost + level_cost) / COST_ONE_BIT) / count
        results[k, 1] = max(error, 0.0) / count


@cache
def _measurer(n: int) -> Kernel:
    lists = lister(n, measuring=True)
    return specialise(encode_jit, _measure, n, area=n * n, order=list_order(n), make_lists=lists)


def _room_for(n: int) -> tuple[Any, ...]:
    group = n * n * lanes_of(n)
    return (
        room("sample_run", group, np.float32),
        room("sample_entries", group + 1, np.int64),
        room("counts", n * n + 1, np.int64),
        group_room(n),
        (
            room("sample_histograms", 2 * SYMBOLS, np.int32).reshape(2, SYMBOLS),
            room("costs", TABLES, np.int32),
        ),
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
        _measurer(n)(values, starts[own], sizes[own], shapes[own], steps[own], *_room_for(n), found)
        results[own] = found

    run_parts(threads, measure_part, parts)
    return results[:, 0], results[:, 1]
