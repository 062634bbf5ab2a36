"""From values to lists of codes: one list a frequency, one for the rest, on the CPU.

An entry is `block << 16 | (magnitude - 1) << 1 | sign`, and entries of a list ascend. Most codes
are zero, so lists are short, and what follows costs nothing where nothing is. Blocks of 8 x 8
stay in registers until it is known which of their coefficients matter (`lanes.py`), and values
without a transform are only looked at; other blocks go through `transform.py` in groups.
"""

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoestring.codec.dct.cpu.lanes import inverse_8, large_64, trailing_zeros, transform_8
from shoestring.codec.dct.cpu.transform import (
    forward_group,
    group_shape,
    inverse_block,
    inverse_group,
    to_value,
)
from shoestring.codec.dct.format import MAX_LEVEL
from shoestring.codec.dct.sampling import lanes_of
from shoestring.codec.dct.steps import ROUNDING
from shoestring.compiled.jit import Kernel, encode_jit, specialise
from shoestring.compiled.scratch import apart, owned

# Entries between lists, and codes between planes: at distances of a power of two they share a cache set.
PADDING = 17
# Groups with more codes than one in this many values are handled as a whole.
FEW = 24

_ONE = np.uint64(1)

# Placeholders, which `specialise` replaces: a block size, its area, the blocks of a group, whether the
# lists are those of a sample, and kernels for this block size.
n = area = width = 0
measuring = False
transform = inverse = inverse_few = leave_group = list_blocks = None


@encode_jit
def _quantise(c, inverse_step):
    """Return the magnitude of the code of a coefficient that is known not to be zero."""
    return min(max(np.int32(abs(c) * inverse_step + ROUNDING), np.int32(1)), np.int32(MAX_LEVEL))


@encode_jit
def _entry(block, magnitude, c):
    return np.int64(block) << 16 | (np.int64(magnitude) - 1) << 1 | np.int64(c < 0)


@encode_jit
def _signed(magnitude, c):
    return magnitude if c > 0 else -magnitude


@encode_jit
def _gain(c, magnitude, inverse_step):
    """Return by how much a code lowers the squared error, in steps squared."""
    return (2 * np.float64(abs(c) * inverse_step) - magnitude) * magnitude


@encode_jit
def _snap_block(x, first, magic, left_over):
    source, target = x[first : first + 64], left_over[first : first + 64]
    for i in range(64):
        target[i] = (source[i] + magic) - magic


def _list_1(x, blocks, step, stride, entries, counts, group, left_over):
    inverse_step, threshold, magic, mantissa, scale = step
    count = 0
    gain = 0.0
    for first in range(0, blocks, 64):
        if first + 64 <= blocks:
            bits = large_64(x, first, magic, threshold)
            if left_over.size:
                _snap_block(x, first, magic, left_over)
        else:
            bits = np.uint64(0)
            for i in range(first, blocks):
                value = (x[i] + magic) - magic
                bits |= np.uint64(abs(value) >= threshold) << np.uint64(i - first)
                if left_over.size:
                    left_over[i] = value
        while bits:
            i = first + np.int64(trailing_zeros(bits))
            bits &= bits - _ONE
            value = (x[i] + magic) - magic
            magnitude = _quantise(value, inverse_step)
            entries[count] = _entry(i, magnitude, value)
            count += 1
            if measuring:
                gain += _gain(value, magnitude, inverse_step)
            if left_over.size:
                left_over[i] = value - to_value(_signed(magnitude, value) << 18, mantissa, scale)
    counts[0] = count
    return gain


def _list_8(x, blocks, step, stride, entries, counts, group, left_over):
    """Like `_list_1`, for blocks of 8 x 8: a list for each coefficient, in lane order."""
    inverse_step, threshold, magic, mantissa, scale = step
    z, codes, values = group
    gain = 0.0
    for g in range(64):
        counts[g] = g * stride  # place of the next entry; the count once all blocks are listed
    for b in range(blocks):
        found = bits = transform_8(x, b * 64, magic, threshold, z)
        while bits:
            g = np.int64(trailing_zeros(bits))
            bits &= bits - _ONE
            c = z[g]
            magnitude = _quantise(c, inverse_step)
            at = counts[g]
            entries[at] = _entry(b, magnitude, c)
            counts[g] = at + 1
            if measuring:
                gain += _gain(c, magnitude, inverse_step)
            if left_over.size:
                codes[g] = _signed(magnitude, c)
        if left_over.size:
            _snap_block(x, b * 64, magic, left_over)
            if found:
                inverse_8(codes, 0, mantissa, scale, values)
                target = left_over[b * 64 : b * 64 + 64]
                for i in range(64):
                    target[i] -= values[i]
                    codes[i] = 0
    for g in range(64):
        counts[g] -= g * stride
    return gain


def _leave_group(x, first, lanes, step, few, codes, rows, y, many, values, left_over):
    """Write `x` less the decoded codes of a group to `left_over`."""
    _, _, magic, mantissa, scale = step
    if not few:
        inverse(many)
        for f in range(area):
            for b in range(width):
                values[f, b] = to_value(many[f, b], mantissa, scale)
    for b in range(lanes):
        source = x[(first + b) * area : (first + b + 1) * area]
        target = left_over[(first + b) * area : (first + b + 1) * area]
        for f in range(area):
            target[f] = (source[f] + magic) - magic
        if not few:
            for f in range(area):
                target[f] -= values[f, b]
        elif rows[b]:
            block = codes[b * area : (b + 1) * area]
            inverse_few(block, rows[b], y)
            for f in range(area):
                target[f] -= to_value(y[f], mantissa, scale)
                block[f] = 0
            rows[b] = 0


def _list_groups(x, blocks, step, stride, entries, counts, group, left_over):
    inverse_step, threshold, magic, _, _ = step
    s, flat, flags, flag_words, codes, rows, y, many = group
    gain = 0.0
    before = 0
    for first in range(0, blocks, width):
        lanes = min(width, blocks - first)
        transform(x, first, lanes, magic, s)
        found = 0
        few = measuring or before * FEW < lanes * area
        if few:
            for i in range(area * width):
                flags[i] = abs(flat[i]) >= threshold
            for f in range(area):
                count = counts[f]
                base = f * stride
                for w in range(f * width // 8, (f + 1) * width // 8):
                    bits = flag_words[w]
                    while bits:
                        i = w * 8 + np.int64(trailing_zeros(bits) >> np.uint64(3))
                        bits &= bits - _ONE
                        b = i - f * width
                        if b >= lanes:
                            break
                        magnitude = _quantise(flat[i], inverse_step)
                        entries[base + count] = _entry(first + b, magnitude, flat[i])
                        count += 1
                        if measuring:
                            gain += _gain(flat[i], magnitude, inverse_step)
                        if left_over.size:
                            codes[b * area + f] = _signed(magnitude, flat[i])
                            rows[b] |= _ONE << np.uint64(f // n)
                found += count - counts[f]
                counts[f] = count
        else:
            for f in range(area):
                for b in range(width):
                    c = s[f, b]
                    level = np.int32(min(abs(c) * inverse_step + ROUNDING, np.float32(MAX_LEVEL)))
                    level = max(level, np.int32(1)) if abs(c) >= threshold else np.int32(0)
                    many[f, b] = level if c > 0 else -level
            for f in range(area):
                count = counts[f]
                base = f * stride
                for b in range(lanes):  # without a branch: there is a code at every few places
                    level = many[f, b]
                    entries[base + count] = _entry(first + b, abs(level), level)
                    count += level != 0
                found += count - counts[f]
                counts[f] = count
        before = found
        if left_over.size:
            leave_group(x, first, lanes, step, few, codes, rows, y, many, s, left_over)
    return gain


def _list(x, blocks, step, stride, entries, counts, group, left_over):
    inverse_step, threshold, magic, mantissa, scale = step
    for f in range(area + 1):
        counts[f] = 0
    gain = list_blocks(x, blocks, step, stride, entries, counts, group, left_over)
    count = 0
    for i in range(blocks * area, x.size):
        value = (x[i] + magic) - magic
        sent = np.float32(0)
        if abs(value) >= threshold:
            magnitude = _quantise(value, inverse_step)
            entries[area * stride + count] = _entry(i - blocks * area, magnitude, value)
            count += 1
            sent = to_value(_signed(magnitude, value) << 18, mantissa, scale)
        if left_over.size:
            left_over[i] = value - sent
    counts[area] = count
    return gain


@cache
def lister(n: int, measuring: bool = False) -> Kernel:
    """Return `kernel(x, blocks, step, stride, entries, counts, group, left_over)` for n x n blocks.

    List k starts at `entries[k * stride]` and has `counts[k]` entries; `list_order` says whose
    it is. `left_over`, unless it is empty, receives x less what its codes decode to. Returns, when
    measuring, by how much the codes of the blocks lower the squared error, in steps squared.
    """
    constants: dict[str, Any] = {"n": n, "area": n * n, "width": lanes_of(n), "measuring": measuring}
    suffix = f"{n}_{measuring}"
    if n in (1, 8):
        blocks = specialise(encode_jit, _list_1 if n == 1 else _list_8, suffix, **constants)
    else:
        inverses = {"inverse": inverse_group(n), "inverse_few": inverse_block(n)}
        leave = specialise(encode_jit, _leave_group, n, **inverses, **constants)
        blocks = specialise(
            encode_jit, _list_groups, suffix, transform=forward_group(n), leave_group=leave, **constants
        )
    return specialise(encode_jit, _list, suffix, list_blocks=blocks, **constants)


def list_order(n: int) -> NDArray[np.int64]:
    """Return the list of each frequency, in planar order; the last is the rest's."""
    order = np.arange(n * n + 1)
    if n == 8:
        order[:64] = order[:64].reshape(8, 8).T.reshape(-1)
    return order


def group_room(n: int) -> tuple[NDArray[Any], ...]:
    """Return this thread's memory for a lister: its `group`."""
    return owned(f"group_{n}", lambda: _make_group(n))


def _make_group(n: int) -> tuple[NDArray[Any], ...]:
    if n in (1, 8):
        return apart(64, np.float32), apart(64, np.int16), apart(64, np.float32)
    area, width = n * n, lanes_of(n)
    s = apart(group_shape(n), np.float32)
    flags = apart(area * width, np.uint8)
    return (
        s,
        s.reshape(-1),
        flags,
        flags.view(np.uint64),
        apart(area * width, np.int16),
        apart(width, np.uint64),
        apart(area, np.int32),
        apart(group_shape(n), np.int32),
    )
