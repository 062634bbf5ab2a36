"""Measure a bucket on the CPU: magnitudes of tensors and costs of samples, for `choice.py`.

`scan` reads everything once (energy, largest magnitude, NaN). `costs` transforms a few
groups of blocks of each tensor and says how many bits the real coder would take for them
at a step and how much error would be left: true costs on true codes, so that a choice
between transforms or steps needs no second encoding.
"""

import math
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoestring.codec.base import Layout, Vector
from shoestring.codec.dct.choice import Floats, Question, is_coded
from shoestring.codec.dct.cpu.encoder import cheapest_table, extra_bits_of, symbol_of
from shoestring.codec.dct.cpu.lists import group_room, list_order, lister
from shoestring.codec.dct.sampling import lanes_of, sample_shape
from shoestring.codec.dct.steps import ROUNDING
from shoestring.codec.dct.tables import COST_ONE_BIT, SYMBOLS, TABLES
from shoestring.compiled.crew import Crew
from shoestring.compiled.jit import Kernel, copy, decode_jit, encode_jit, specialise, sum_jit
from shoestring.compiled.scratch import owned, room
from shoestring.compiled.turns import Turns, new_turns, take_turn

_NON_FINITE = np.int32(0x7F800000)
_MAGNITUDE = np.int32(0x7FFFFFFF)
_SEGMENT = 1 << 16
# Values that a thread scans at a time: long runs are read fastest, but every thread needs a run.
_RUNS, _SHORTEST_RUN, _LONGEST_RUN = 16, 1 << 16, 1 << 19
# Values that are worth one more thread: waking a thread takes time too.
_SCANNED, _SAMPLED = 1 << 20, 1 << 17


@sum_jit
def _scan(values, bits, starts, sizes, runs, turns, energy, top):
    while True:
        run = take_turn(turns)
        if run >= runs.size - 1:
            return
        for k in range(runs[run], runs[run + 1]):
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


@dataclass(frozen=True)
class _Segments:
    """A bucket cut into pieces of one tensor each; a thread takes a run of pieces."""

    begins: NDArray[np.int64]  # [tensors + 1], the first piece of each tensor
    starts: NDArray[np.int64]
    sizes: NDArray[np.int64]
    runs: NDArray[np.int64]  # the first piece of each run, and how many pieces there are


@lru_cache(maxsize=1024)  # a large model has hundreds of parts
def _segments(layout: Layout) -> _Segments:
    length = min(max(layout.total // _RUNS, _SHORTEST_RUN), _LONGEST_RUN)
    begins, runs, run = [0], [0], 0
    starts: list[int] = []
    sizes: list[int] = []
    for offset, size in zip(layout.offsets, layout.sizes, strict=False):
        for first in range(0, size, _SEGMENT):
            if run >= length:
                runs.append(len(sizes))
                run = 0
            starts.append(offset + first)
            sizes.append(min(_SEGMENT, size - first))
            run += sizes[-1]
        begins.append(len(starts))
    runs.append(len(sizes))
    return _Segments(*(np.array(column, np.int64) for column in (begins, starts, sizes, runs)))


@decode_jit
def _sum_up(begins, sums, tops, energy, largest):
    """Write the energy and the largest magnitude of every tensor; return the first with a NaN, or -1."""
    for t in range(energy.size):
        top = np.int32(0)
        for k in range(begins[t], begins[t + 1]):
            energy[t] += sums[k]
            top = max(top, tops[k])
        if top >= _NON_FINITE:
            return t
        largest[t] = np.float64(np.int32(top).view(np.float32))
    return -1


def scan(values: Vector, layout: Layout, crew: Crew) -> tuple[Floats, Floats, int]:
    """Return each tensor's energy and largest magnitude, and the first that is not finite or -1."""
    energy, largest = np.zeros(len(layout.sizes)), np.zeros(len(layout.sizes))
    cut = _segments(layout)
    sums, tops = np.empty(cut.starts.size), np.empty(cut.starts.size, np.int32)
    bits = values.view(np.int32)
    crew.run(
        1 + layout.total // _SCANNED,
        lambda turns: _scan(values, bits, cut.starts, cut.sizes, cut.runs, turns, sums, tops),
    )
    return energy, largest, _sum_up(cut.begins, sums, tops, energy, largest)


# Placeholders, which `specialise` replaces: a block's area, the list of each frequency, the lister.
area = 0
order = np.zeros(1, np.int64)
make_lists = None


@sum_jit
def _energy(x):
    total = np.float32(0)
    for i in range(x.size):
        total += x[i] * x[i]
    return np.float64(total)


def _measure(
    values, numbers, tensors, starts, sizes, shapes, turns, energy, largest, relative, run, entries, counts,
    group, coder, results,
):  # fmt: skip
    """Write (bits, squared error in steps), both a value, of each tensor's sample.

    A sample is some groups of blocks, a group some runs of blocks from all over the tensor.
    Its codes are taken in planar order, group after group.
    """
    histograms, table_costs = coder
    while True:
        k = take_turn(turns)
        if k >= starts.size:
            return
        if not is_coded(largest[tensors[k]]):
            continue
        x = values[starts[k] : starts[k] + sizes[k]]
        groups, runs, each = shapes[k, 0], shapes[k, 1], shapes[k, 2]
        lanes = runs * each
        apart = max(groups * runs - 1, 1)
        wanted = relative * math.sqrt(energy[tensors[k]] / x.size)
        inverse_step = np.float32(1 / wanted)
        threshold = np.float32((1 - ROUNDING) * wanted)
        step = (inverse_step, threshold, np.float32(0), np.int32(0), np.float32(0))
        for symbol in range(SYMBOLS):
            histograms[0, symbol] = histograms[1, symbol] = 0
        bits = 0
        error = 0.0
        previous = -1
        for g in range(groups):
            for r in range(runs):
                first = (g * runs + r) * (x.size // area - each) // apart
                copy(x, first * area, run, r * each * area, each * area)
            own = run[: lanes * area]
            error += _energy(own) * np.float64(inverse_step) ** 2
            error -= make_lists(own, lanes, step, lanes, entries, counts, group, own[:0])
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
        results[0, numbers[k]] = (bits + np.float64(gap_cost + level_cost) / COST_ONE_BIT) / count
        results[1, numbers[k]] = max(error, 0.0) / count


@cache
def _measurer(n: int) -> Kernel:
    lists = lister(n, measuring=True)
    return specialise(encode_jit, _measure, n, area=n * n, order=list_order(n), make_lists=lists)


def _room_for(n: int) -> tuple[Any, ...]:
    return owned(f"sample_{n}", lambda: _make_room(n))


def _make_room(n: int) -> tuple[Any, ...]:
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
    """Samples of one block size: their numbers, their tensors and the tensors' places."""

    n: int
    numbers: NDArray[np.int64]
    tensors: NDArray[np.int64]
    starts: NDArray[np.int64]
    sizes: NDArray[np.int64]
    shapes: NDArray[np.int64]


@lru_cache(maxsize=1024)
def _samples(layout: Layout, question: Question) -> tuple[list[_Samples], int]:
    """List the samples by block size, the largest first; return these and their number of values."""
    wanted = question.wanted
    shapes = np.array([sample_shape(layout.sizes[index], n) for index, n in wanted], np.int64).reshape(-1, 3)
    weights = shapes.prod(axis=1) * np.array([n * n for _, n in wanted], np.int64)
    largest_first = np.argsort(-weights, kind="stable").tolist()
    by_size = []
    for n in sorted({n for _, n in wanted}, reverse=True):
        chosen = [k for k in largest_first if wanted[k][1] == n and weights[k]]
        if chosen:
            tensors = np.array([wanted[k][0] for k in chosen], np.int64)
            starts, sizes = np.array(layout.offsets, np.int64), np.array(layout.sizes, np.int64)
            by_size.append(
                _Samples(n, np.array(chosen), tensors, starts[tensors], sizes[tensors], shapes[chosen])
            )
    return by_size, int(weights.sum())


def costs(
    values: Vector,
    layout: Layout,
    question: Question,
    energy: Floats,
    largest: Floats,
    relative: float,
    crew: Crew,
) -> Floats:
    """Return [bits, squared error in steps squared], both a value, of each sample at a step over rms."""
    results = np.zeros((2, len(question.wanted)))
    by_size, total = _samples(layout, question)
    more = [new_turns() for _ in by_size[1:]]

    def measure(turns: Turns) -> None:
        for own, turn in zip(by_size, [turns, *more], strict=False):
            _measurer(own.n)(
                values, own.numbers, own.tensors, own.starts, own.sizes, own.shapes, turn, energy, largest,
                relative, *_room_for(own.n), results,
            )  # fmt: skip

    crew.run(1 + total // _SAMPLED, measure)
    return results
