"""Compiled block transforms: floats to coefficients, and integer codes to exact integers.

A group of blocks is turned so that one row holds one coefficient of every block: the
lanes of a vector unit are blocks, whatever their size. Rows are the planar order of the
stream. A block with few codes is inverted by itself, at a cost for each code.
"""

import math
from functools import cache

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from shoestring.codec.dct.basis import integer_basis
from shoestring.codec.dct.format import BASIS_SHIFT, INVERSE_SHIFT, MAX_LEVEL
from shoestring.codec.dct.jit import Kernel, decode_jit, encode_jit, specialise
from shoestring.codec.dct.sampling import lanes_of
from shoestring.codec.dct.steps import ROUNDING

# Stand for a block size, its area, the blocks of a group and constants of its basis; each
# kernel below that uses them is compiled once a block size with their values (`specialise`).
n = area = width = 0
cosine = basis = np.zeros((1, 1), np.float32)
line = columns = rows = None

_HALF_STEP = np.int32(1 << (INVERSE_SHIFT - 1))
_SHIFT = np.int32(INVERSE_SHIFT)
_IDENTITY_SHIFT = np.int32(2 * BASIS_SHIFT)


@intrinsic
def trailing_zeros(context, value):
    """Count the zero bits below the lowest one; undefined for 0."""

    def generate(context, builder, signature, args):
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.uint64(types.uint64), generate


# Loops whose length is known when they are compiled become straight vector code.
_WIDTH_3, _WIDTH_8 = lanes_of(3), lanes_of(8)
_S1, _S2, _S3, _S5, _S6, _S7 = (np.float32(math.cos(math.pi * k / 16) / 2) for k in (1, 2, 3, 5, 6, 7))
_R8, _R2, _R3, _R6 = (np.float32(math.sqrt(1 / k)) for k in (8, 2, 3, 6))


@encode_jit
def _dct_3(x, y, z):
    return (x + z + y) * _R3, (x - z) * _R2, (x + z - y - y) * _R6


@encode_jit
def _dct_8(x0, x1, x2, x3, x4, x5, x6, x7):
    p0, p1, p2, p3 = x0 + x7, x1 + x6, x2 + x5, x3 + x4
    m0, m1, m2, m3 = x0 - x7, x1 - x6, x2 - x5, x3 - x4
    q0, q1, r0, r1 = p0 + p3, p1 + p2, p0 - p3, p1 - p2
    return (
        (q0 + q1) * _R8,
        m0 * _S1 + m1 * _S3 + m2 * _S5 + m3 * _S7,
        r0 * _S2 + r1 * _S6,
        m0 * _S3 - m1 * _S7 - m2 * _S1 - m3 * _S5,
        (q0 - q1) * _R8,
        m0 * _S5 - m1 * _S1 + m2 * _S7 + m3 * _S3,
        r0 * _S6 - r1 * _S2,
        m0 * _S7 - m1 * _S5 + m2 * _S3 - m3 * _S1,
    )


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


@encode_jit
def _columns_8(s, m):
    for j in range(8):
        for b in range(_WIDTH_8):
            y = _dct_8(
                (s[j, b] + m) - m, (s[j + 8, b] + m) - m, (s[j + 16, b] + m) - m,
                (s[j + 24, b] + m) - m, (s[j + 32, b] + m) - m, (s[j + 40, b] + m) - m,
                (s[j + 48, b] + m) - m, (s[j + 56, b] + m) - m,
            )  # fmt: skip
            s[j, b], s[j + 8, b], s[j + 16, b], s[j + 24, b] = y[0], y[1], y[2], y[3]
            s[j + 32, b], s[j + 40, b], s[j + 48, b], s[j + 56, b] = y[4], y[5], y[6], y[7]


@encode_jit
def _rows_8(s):
    for a in range(0, 64, 8):
        for b in range(_WIDTH_8):
            y = _dct_8(
                s[a, b],
                s[a + 1, b],
                s[a + 2, b],
                s[a + 3, b],
                s[a + 4, b],
                s[a + 5, b],
                s[a + 6, b],
                s[a + 7, b],
            )
            s[a, b], s[a + 1, b], s[a + 2, b], s[a + 3, b] = y[0], y[1], y[2], y[3]
            s[a + 4, b], s[a + 5, b], s[a + 6, b], s[a + 7, b] = y[4], y[5], y[6], y[7]


def _forward_line(s, a, step):
    t = np.empty((n, width), np.float32)
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
    if n > 1:
        for j in range(n):
            line(s, j, n)


def _rows(s):
    if n > 1:
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
    """Return `kernel(x, first, lanes, magic, s)` for n x n blocks; `s` is [area, lanes_of(n)]."""
    constants = {"n": n, "area": n * n, "width": lanes_of(n)}
    passes = {3: (_columns_3, _rows_3), 8: (_columns_8, _rows_8)}.get(n)
    if passes is None:
        scaled = (integer_basis(n) / np.float32(1 << BASIS_SHIFT)).astype(np.float32)
        each = specialise(encode_jit, _forward_line, n, cosine=scaled, **constants)
        passes = (
            specialise(encode_jit, _columns, n, line=each, **constants),
            specialise(encode_jit, _rows, n, line=each, **constants),
        )
    return specialise(encode_jit, _forward_group, n, columns=passes[0], rows=passes[1], **constants)


_B8 = [np.int32(v) for v in integer_basis(8)[:, 0]]
_C0, _C1, _C2, _C3, _C5, _C6, _C7 = _B8[0], _B8[1], _B8[2], _B8[3], _B8[5], _B8[6], _B8[7]
_D0, _D1 = np.int32(integer_basis(3)[0, 0]), np.int32(integer_basis(3)[1, 0])
_D2, _D3 = np.int32(integer_basis(3)[2, 0]), np.int32(integer_basis(3)[2, 1])


@decode_jit
def _inverse_line_3(s, a, step):
    for b in range(_WIDTH_3):
        x, y, z = s[a, b] * _D0, s[a + step, b] * _D1, s[a + 2 * step, b]
        s[a, b] = x + y + z * _D2
        s[a + step, b] = x + z * _D3
        s[a + 2 * step, b] = x - y + z * _D2


@decode_jit
def _inverse_line_8(s, a, step):
    for b in range(_WIDTH_8):
        x0, x1, x2, x3 = s[a, b], s[a + step, b], s[a + 2 * step, b], s[a + 3 * step, b]
        x4, x5, x6, x7 = s[a + 4 * step, b], s[a + 5 * step, b], s[a + 6 * step, b], s[a + 7 * step, b]
        p, q = x0 * _C0, x4 * _C0
        r, t = x2 * _C2 + x6 * _C6, x2 * _C6 - x6 * _C2
        e0, e1, e2, e3 = p + q + r, p - q + t, p - q - t, p + q - r
        o0 = x1 * _C1 + x3 * _C3 + x5 * _C5 + x7 * _C7
        o1 = x1 * _C3 - x3 * _C7 - x5 * _C1 - x7 * _C5
        o2 = x1 * _C5 - x3 * _C1 + x5 * _C7 + x7 * _C3
        o3 = x1 * _C7 - x3 * _C5 + x5 * _C3 - x7 * _C1
        s[a, b], s[a + 7 * step, b] = e0 + o0, e0 - o0
        s[a + step, b], s[a + 6 * step, b] = e1 + o1, e1 - o1
        s[a + 2 * step, b], s[a + 5 * step, b] = e2 + o2, e2 - o2
        s[a + 3 * step, b], s[a + 4 * step, b] = e3 + o3, e3 - o3


def _inverse_line(s, a, step):
    t = np.empty((n, width), np.int32)
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
    """Turn the codes of a group into integers, in place. Sums wrap at 32 bits."""
    if n == 1:
        for b in range(width):
            s[0, b] = s[0, b] << _IDENTITY_SHIFT
    else:
        for j in range(n):
            line(s, j, n)
        for u in range(n):
            line(s, u * n, 1)


@cache
def inverse_group(n: int) -> Kernel:
    """Return `kernel(s)` for n x n blocks; `s` is int32 [area, lanes_of(n)]."""
    constants = {"n": n, "area": n * n, "width": lanes_of(n)}
    fitting = {3: _inverse_line_3, 8: _inverse_line_8}.get(n)
    if fitting is None:
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
def quantise(c, inverse_step):
    """Return the code of a coefficient that is known not to be zero."""
    level = min(max(np.int32(abs(c) * inverse_step + ROUNDING), np.int32(1)), np.int32(MAX_LEVEL))
    return level if c > 0 else -level


@decode_jit
def to_value(y, mantissa, scale):
    """Turn an integer of the inverse transform into its float: exact, see format.py."""
    return np.float32(((np.int32(y) + _HALF_STEP) >> _SHIFT) * mantissa) * scale
