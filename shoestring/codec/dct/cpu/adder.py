"""From lists of codes to values: decoded tiles, inverted and added to a vector, on the CPU.

Only blocks that hold codes are touched. What each value gets is defined to the bit (README.md), so
it does not matter whether blocks are inverted one by one, eight rows at a time, or in groups.
"""

from functools import cache

import numpy as np
from numpy.typing import NDArray

from shoestring.codec.dct import format as fmt
from shoestring.codec.dct.cpu.lanes import inverse_8
from shoestring.codec.dct.cpu.lists import FEW, PADDING, list_order
from shoestring.codec.dct.cpu.transform import group_shape, inverse_block, inverse_group, to_value
from shoestring.codec.dct.sampling import lanes_of
from shoestring.codec.dct.steps import MANTISSA, SCALE
from shoestring.compiled.jit import Kernel, decode_jit, specialise
from shoestring.compiled.scratch import apart, owned
from shoestring.compiled.turns import take_turn

# Placeholders, which `specialise` replaces: a block size, its area, the blocks of a group, the list of
# each frequency, and kernels for this block size.
n = area = width = 0
order = np.zeros(1, np.int64)
inverse = inverse_few = scatter = scatter_planar = add_few = add_many = None


@decode_jit
def _code(entry):
    """Return the code of an entry (`lists.py`)."""
    magnitude = np.int32((entry & 0xFFFF) >> 1) + np.int32(1)
    return np.int32(-magnitude if entry & 1 else magnitude)


@decode_jit
def _add_rest(out, entries, offset, mantissa, scale, weight):
    for entry in entries:
        out[(entry >> 16) - offset] += weight * to_value(_code(entry) << 18, mantissa, scale)


def _scatter(entries, offset, blocks, codes, rows):
    """Write codes block after block, and to `rows` which rows of a block have any."""
    row_end = g = u = 0
    for entry in entries:
        position = (entry >> 16) - offset
        if position >= row_end:
            f = position // blocks
            row_end = (f + 1) * blocks
            g, u = order[f], f // n
        b = position - row_end + blocks
        codes[b * area + g] = _code(entry)
        rows[b] |= np.uint64(1) << np.uint64(u)


def _add_few(out, blocks, codes, rows, mantissa, scale, weight, s, values):
    """Invert the blocks that hold codes one by one."""
    y = s.reshape(s.size)[:area]
    for b in range(blocks):
        if rows[b]:
            block = codes[b * area : (b + 1) * area]
            target = out[b * area : (b + 1) * area]
            inverse_few(block, rows[b], y)
            for f in range(area):
                target[f] += weight * to_value(y[f], mantissa, scale)
                block[f] = 0
            rows[b] = 0


def _add_8(out, blocks, codes, rows, mantissa, scale, weight, s, values):
    """Like `_add_few`, for blocks of 8 x 8, in registers."""
    for b in range(blocks):
        if rows[b]:
            rows[b] = 0
            inverse_8(codes, b * 64, mantissa, scale, values)
            block, target = codes[b * 64 : b * 64 + 64], out[b * 64 : b * 64 + 64]
            for i in range(64):
                target[i] += weight * values[i]
                block[i] = 0


def _scatter_planar(entries, offset, blocks, codes, rows):
    row_end = shift = 0
    for entry in entries:
        position = (entry >> 16) - offset
        if position >= row_end:
            f = position // blocks
            row_end = (f + 1) * blocks
            shift = f * PADDING
        codes[position + shift] = _code(entry)
        rows[position - row_end + blocks] = 1


def _add_many(out, blocks, codes, rows, mantissa, scale, weight, s, values):
    """Invert group after group; blocks without codes stay untouched here too."""
    stride = blocks + PADDING
    for first in range(0, blocks, width):
        lanes = min(width, blocks - first)
        for f in range(area):
            row = codes[f * stride + first : f * stride + first + lanes]
            for b in range(lanes):
                s[f, b] = row[b]
                row[b] = 0
        inverse(s)
        for f in range(area):
            for b in range(width):
                values[f, b] = weight * to_value(s[f, b], mantissa, scale)
        for b in range(lanes):
            if rows[first + b]:
                rows[first + b] = 0
                target = out[(first + b) * area : (first + b + 1) * area]
                for f in range(area):
                    target[f] += values[f, b]


def _add_tiles(out, tiles, turns, entries, places, counts, codes, rows, steps, weight, s, values):
    """Take decoded tiles and add them; `codes` and `rows` are zero before and after each."""
    while True:
        k = take_turn(turns)
        if k >= tiles.shape[0]:
            return
        tile = tiles[k]
        start, size, blocks = tile[fmt.TILE_START], tile[fmt.TILE_SIZE], tile[fmt.TILE_BLOCKS]
        first, chunk_log2 = tile[fmt.TILE_FIRST_CHUNK], tile[fmt.TILE_CHUNK_LOG2]
        own_step = steps[tile[fmt.TILE_TENSOR]]
        mantissa, scale = np.int32(own_step[MANTISSA]), own_step[SCALE]
        target = out[start : start + size]
        offset, is_shared = tile[fmt.TILE_OFFSET], chunk_log2 >= fmt.TILE_LOG2
        own_counts = counts[first : first + (1 if is_shared else ((size - 1) >> chunk_log2) + 1)]
        plain = offset + (blocks * area if n > 1 else 0)
        many = n != 8 and own_counts.sum() * FEW >= size
        for c in range(own_counts.size):
            own = entries[places[first + c] : places[first + c] + own_counts[c]]
            if is_shared:
                own = own[np.searchsorted(own, offset << 16) : np.searchsorted(own, offset + size << 16)]
                many = n != 8 and own.size * FEW >= size
            cut = own.size
            if cut and own[-1] >> 16 >= plain:
                cut = np.searchsorted(own, plain << 16)
                _add_rest(target, own[cut:], offset, mantissa, scale, weight)
            if n > 1:
                if many:
                    scatter_planar(own[:cut], offset, blocks, codes, rows)
                else:
                    scatter(own[:cut], offset, blocks, codes, rows)
        if n > 1 and many:
            add_many(target, blocks, codes, rows, mantissa, scale, weight, s, values)
        elif n > 1:
            add_few(target, blocks, codes, rows, mantissa, scale, weight, s, values)


@cache
def adder(n: int) -> Kernel:
    """Return the kernel that adds tiles of n x n blocks."""
    constants = {"n": n, "area": n * n, "width": lanes_of(n), "order": list_order(n)}
    if n == 8:
        few = many = specialise(decode_jit, _add_8, n)
    else:
        few = specialise(decode_jit, _add_few, n, inverse_few=inverse_block(n), **constants)
        many = specialise(decode_jit, _add_many, n, inverse=inverse_group(n), **constants)
    scatters = {
        "scatter": specialise(decode_jit, _scatter, n, **constants),
        "scatter_planar": specialise(decode_jit, _scatter_planar, n, **constants),
    }
    return specialise(decode_jit, _add_tiles, n, add_few=few, add_many=many, **scatters, **constants)


def inverse_room(n: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Return this thread's memory for codes and values of a group; of a block, if n is 8."""
    shape = group_shape(n)
    values = (64,) if n == 8 else shape
    return owned(f"inverse_{n}", lambda: (apart(shape, np.int32), apart(values, np.float32)))
