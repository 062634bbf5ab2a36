"""Compiled block transforms: floats to coefficients, and integer codes to exact integers.

A group of blocks is turned so that one row holds one coefficient of every block: the
lanes of a vector unit are blocks, whatever their size. Rows are the planar order of the
stream. A block with few codes is inverted by itself, at a cost for each code. Blocks of
8 x 8 have a better way (`lanes.py`), and those of one value need none.
"""

import math
from functools import cache

import numpy as np

from shoestring.codec.dct.basis import integer_basis
from shoestring.codec.dct.cpu.lanes import trailing_zeros
from shoestring.codec.dct.format import BASIS_SHIFT, INVERSE_SHIFT
from shoestring.codec.dct.sampling import lanes_of
from shoestring.compiled.jit import Kernel, decode_jit, encode_jit, specialise

# Placeholders, which `specialise` replaces in a copy of each kernel for each block size: the block
# size, its area, the blocks of a group, and constants of its basis.
n = area = width = 0
cosine = basis = np.zeros((1, 1), np.float32)
line = columns = rows = None

_HALF_STEP = np.int32(1 << (INVERSE_SHIFT - 1))
_SHIFT = np.int32(INVERSE_SHIFT)

# Loops whose length is known when they are compiled become straight vector code.
_WIDTH_3 = lanes_of(3)
_R2, _R3, _R6 = (np.float32(math.sqrt(1 / k)) for k in (2, 3, 6))


def group_shape(n: int) -> tuple[int, int]:
    """Return the shape of a group: a row for each coefficient, and n more as memory."""
    return n * n + n, lanes_of(n)


@encode_jit
def _dct_3(x, y, z):
    return (x + z + y) * _R3, (x - z) * _R2, (x + z - y - y) * _R6


@encode_jit
def _columns_3(s, m):
    for j in range(3):
        for b in range(_WIDTH_3):
            y = _dct_3((s[j, b] + m) - m, (s[j + 3, b] + m) - m, (s[j + 6, b] + m) - m)
            s[j, b], s[j + 3, b], s[j + 6, b] = y


@encode_jit
def _rows_3(s):
    for a in range(0, 9, 3):
        for b in range(_WIDTH_3):
            s[a, b], s[a + 1, b], s[a + 2, b] = _dct_3(s[a, b], s[a + 1, b], s[a + 2, b])


def _forward_line(s, a, step):
    t = s[area : area + n]
    for u in range(n):
        for b in range(width):
            t[u, b] = cosine[u, 0] * s[a, b]
        for i in range(1, n):
            c = cosine[u, i]
            for b in range(width):
                t[u, b] += c * s[a + i * step, b]
    for u in range(n):
        for b in range(width):
            s[a + u * step, b] = t[u, b]


def _columns(s, magic):
    for f in range(area):
        for b in range(width):
            s[f, b] = (s[f, b] + magic) - magic
    for j in range(n):
        line(s, j, n)


def _rows(s):
    for u in range(n):
        line(s, u * n, 1)


def _forward_group(x, first, lanes, magic, s):
    """Snap, turn and transform the blocks from `first` on into the rows of `s`."""
    for b in range(lanes):
        block = x[(first + b) * area : (first + b + 1) * area]
        for f in range(area):
            s[f, b] = block[f]
    columns(s, magic)
    rows(s)


@cache
def forward_group(n: int) -> Kernel:
    """Return `kernel(x, first, lanes, magic, s)` for n x n blocks; `s` has `group_shape(n)`."""
    constants = {"n": n, "area": n * n, "width": lanes_of(n)}
    passes = (_columns_3, _rows_3)
    if n != 3:
        scaled = (integer_basis(n) / np.float32(1 << BASIS_SHIFT)).astype(np.float32)
        each = specialise(encode_jit, _forward_line, n, cosine=scaled, **constants)
        passes = (
            specialise(encode_jit, _columns, n, line=each, **constants),
            specialise(encode_jit, _rows, n, line=each, **constants),
        )
    return specialise(encode_jit, _forward_group, n, columns=passes[0], rows=passes[1], **constants)


_D0, _D1 = np.int32(integer_basis(3)[0, 0]), np.int32(integer_basis(3)[1, 0])
_D2, _D3 = np.int32(integer_basis(3)[2, 0]), np.int32(integer_basis(3)[2, 1])


@decode_jit
def _inverse_line_3(s, a, step):
    for b in range(_WIDTH_3):
        x, y, z = s[a, b] * _D0, s[a + step, b] * _D1, s[a + 2 * step, b]
        s[a, b] = x + y + z * _D2
        s[a + step, b] = x + z * _D3
        s[a + 2 * step, b] = x - y + z * _D2


def _inverse_line(s, a, step):
    t = s[area : area + n]
    for i in range(n):
        for b in range(width):
            t[i, b] = np.int32(basis[0, i] * s[a, b])
        for u in range(1, n):
            c = basis[u, i]
            for b in range(width):
                t[i, b] += np.int32(c * s[a + u * step, b])
    for i in range(n):
        for b in range(width):
            s[a + i * step, b] = t[i, b]


def _inverse_group(s):
    """Inverse transform of a group of codes to integers, in place. Sums wrap at 32 bits."""
    for j in range(n):
        line(s, j, n)
    for u in range(n):
        line(s, u * n, 1)


@cache
def inverse_group(n: int) -> Kernel:
    """Return `kernel(s)` for n x n blocks; `s` is int32 with `group_shape(n)`."""
    constants = {"n": n, "area": n * n, "width": lanes_of(n)}
    fitting = _inverse_line_3
    if n != 3:
        fitting = specialise(decode_jit, _inverse_line, n, basis=integer_basis(n), **constants)
    return specialise(decode_jit, _inverse_group, n, line=fitting, **constants)


def _inverse_block(codes, rows, y):
    for i in range(n * n):
        y[i] = 0
    while rows:
        u = np.int64(trailing_zeros(rows))
        rows &= rows - np.uint64(1)
        row = codes[u * n : u * n + n]
        for v in range(n):
            code = np.int32(row[v])
            if code:
                for i in range(n):
                    c = np.int32(code * basis[u, i])
                    line = y[i * n : i * n + n]
                    for j in range(n):
                        line[j] += np.int32(c * basis[v, j])


@cache
def inverse_block(n: int) -> Kernel:
    """Return `kernel(codes, rows, y)`: the integers of one block with few codes.

    `rows` has a bit for each row that holds a code. Sums wrap at 32 bits, on every
    backend alike; an encoder's own streams stay below.
    """
    return specialise(decode_jit, _inverse_block, n, n=n, basis=integer_basis(n))


@decode_jit
def to_value(y, mantissa, scale):
    """Turn an integer of the inverse transform into its float: exact, see format.py."""
    return np.float32(((np.int32(y) + _HALF_STEP) >> _SHIFT) * mantissa) * scale
