"""Measure a bucket on the CPU: what an encoder must know before it chooses.

`scan` reads everything once (energy, largest magnitude, NaN). `costs` transforms a few
groups of blocks of each tensor and says how many bits the real coder would take for them
at a step and how much error would be left: true costs on true codes, so that a choice
between transforms or steps needs no second encoding.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoestring.codec.base import Layout, Vector
from shoestring.codec.dct.entropy import cheapest_table, extra_bits_of, symbol_of
from shoestring.codec.dct.jit import Kernel, encode_jit, specialise, sum_jit
from shoestring.codec.dct.lists import group_room, list_order, lister
from shoestring.codec.dct.sampling import lanes_of, sample_shape
from shoestring.codec.dct.steps import ROUNDING
from shoestring.codec.dct.tables import COST_ONE_BIT, SYMBOLS, TABLES
from shoestring.codec.scratch import balance, room, run_parts

Floats = NDArray[np.float64]

_NON_FINITE = np.int32(0x7F800000)
_MAGNITUDE = np.int32(0x7FFFFFFF)
_SEGMENT = 1 << 16
_WORTH_A_THREAD = 1 << 17  # sampled values


@sum_jit
def _scan(values, bits, numbers, starts, sizes, energy, top):
    for k in range(numbers.size):
        own = values[starts[k] : starts[k] + sizes[k]]
        own_bits = bits[starts[k] : starts[k] + sizes[k]]
        total = 0.0
        largest = np.int32(0)
        for i in range(own.size):
            value = np.float64(own[i])
            total += value * value
            largest = max(largest, own_bits[i] & _MAGNITUDE)
        energy[numbers[k]] = total
        top[numbers[k]] = largest


@lru_cache(maxsize=64)
def _segments(layout: Layout, threads: int) -> tuple[NDArray[np.int64], list[tuple[NDArray[np.int64], ...]]]:
    """Cut all tensors that have values into segments.

    Return the first segment of each tensor, and for each thread (numbers, starts, sizes) of its own.
    """
    begins: list[int] = []
    starts: list[int] = []
    sizes: list[int] = []
    for offset, size in zip(layout.offsets, layout.sizes, strict=False):
        if size:
            begins.append(len(starts))
        for first in range(0, size, _SEGMENT):
            starts.append(offset + first)
            sizes.append(min(_SEGMENT, size - first))
    columns = (np.arange(len(starts)), np.array(starts, np.int64), np.array(sizes, np.int64))
    parts = [tuple(column[own] for column in columns) for own in balance(sizes, threads)]
    return np.array(begins, np.int64), parts


def scan(values: Vector, layout: Layout, threads: int) -> tuple[Floats, Floats, int]:
    """Return each tensor's energy and largest magnitude, and the first that is not finite or -1."""
    energy, largest = np.zeros(len(layout.sizes)), np.zeros(len(layout.sizes), np.int32)
    if not layout.total:
        return energy, largest.astype(np.float64), -1
    begins, parts = _segments(layout, threads)
    count = sum(numbers.size for numbers, _, _ in parts)
    sums, tops = np.empty(count), np.empty(count, np.int32)
    bits = values.view(np.int32)
    run_parts(threads, lambda part: _scan(values, bits, *part, sums, tops), parts)
    filled = np.flatnonzero(layout.sizes)
    energy[filled] = np.add.reduceat(sums, begins)
    largest[filled] = np.maximum.reduceat(tops, begins)
    bad = np.flatnonzero(largest >= _NON_FINITE)
    return energy, largest.view(np.float32).astype(np.float64), int(bad[0]) if bad.size else -1


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


def _measure(values, numbers, starts, sizes, shapes, steps, run, entries, counts, group, coder, results):
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
        inverse_step = np.float32(1 / steps[numbers[k]])
        threshold = np.float32((1 - ROUNDING) * steps[numbers[k]])
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
        results[numbers[k], 0] = (bits + np.float64(gap_cost + level_cost) / COST_ONE_BIT) / count
        results[numbers[k], 1] = max(error, 0.0) / count


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


@dataclass(frozen=True)
class _Samples:
    """Samples of one block size that a thread measures: their numbers, and where they lie."""

    n: int
    numbers: NDArray[np.int64]
    starts: NDArray[np.int64]
    sizes: NDArray[np.int64]
    shapes: NDArray[np.int64]


@lru_cache(maxsize=64)
def _deal(layout: Layout, wanted: tuple[tuple[int, int], ...], threads: int) -> list[list[_Samples]]:
    """Say which thread measures which samples."""
    shapes = np.array([sample_shape(layout.sizes[index], n) for index, n in wanted], np.int64).reshape(-1, 3)
    weights = [float(shape.prod()) * n * n for shape, (_, n) in zip(shapes, wanted, strict=True)]
    # Samples are small, and waking a thread takes time.
    threads = min(threads, 1 + int(sum(weights)) // _WORTH_A_THREAD)
    parts = []
    for own in balance(weights, threads):
        part = []
        for n in sorted({wanted[k][1] for k in own}):
            chosen = [k for k in own if wanted[k][1] == n and weights[k]]
            if chosen:
                starts = np.array([layout.offsets[wanted[k][0]] for k in chosen], np.int64)
                sizes = np.array([layout.sizes[wanted[k][0]] for k in chosen], np.int64)
                part.append(_Samples(n, np.array(chosen), starts, sizes, shapes[chosen]))
        parts.append(part)
    return parts


def costs(
    values: Vector, layout: Layout, wanted: Sequence[tuple[int, int]], steps: Floats, threads: int
) -> tuple[Floats, Floats]:
    """Return the bits, and the squared error in steps squared, a value, of each (tensor, n) at its step."""
    results = np.zeros((len(wanted), 2))

    def measure_part(part: list[_Samples]) -> None:
        for own in part:
            _measurer(own.n)(
                values, own.numbers, own.starts, own.sizes, own.shapes, steps, *_room_for(own.n), results
            )

    run_parts(threads, measure_part, _deal(layout, tuple(wanted), threads))
    return results[:, 0], results[:, 1]
