"""Compiled block transforms: floats to sparse integer codes, and codes to exact values.

Forward, a group of blocks is turned so that one row holds one coefficient of every
block: the lanes of a vector unit are blocks, whatever their size. Codes that are not
zero go into one list a frequency, which is planar order. The inverse is sparse: it
costs what the rows and columns with codes in them cost.

The forward transform may fuse multiply and add, as encoders are free to round. What a
decoder does is integer arithmetic and one exact product.
"""

import math
from functools import cache

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from shoestring.codec.dct.basis import integer_basis
from shoestring.codec.dct.format import BASIS_SHIFT, INVERSE_SHIFT, MAX_LEVEL
from shoestring.codec.dct.jit import Kernel, decode_jit, encode_jit
from shoestring.codec.dct.steps import ROUNDING

_HALF_STEP = np.int32(1 << (INVERSE_SHIFT - 1))
_SHIFT = np.int32(INVERSE_SHIFT)


@intrinsic
def trailing_zeros(context, value):
    """Count the zero bits below the lowest one; undefined for 0."""

    def generate(context, builder, signature, args):
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.uint64(types.uint64), generate


def lanes_of(n: int) -> int:
    """How many blocks make a group: about 2,048 values, which stay in the first cache."""
    return max(8, 2048 // (n * n) // 8 * 8)


_I = tuple(np.float32(math.cos(math.pi * k / 16) / 2) for k in range(8))
_S1, _S2, _S3, _S5, _S6, _S7 = _I[1], _I[2], _I[3], _I[5], _I[6], _I[7]
_R8 = np.float32(math.sqrt(1 / 8))
_R2, _R3, _R6 = (np.float32(math.sqrt(1 / k)) for k in (2, 3, 6))


@encode_jit
def _line3(s, a, step, lanes):
    for b in range(lanes):
        x, y, z = s[a, b], s[a + step, b], s[a + 2 * step, b]
        s[a, b] = (x + z + y) * _R3
        s[a + step, b] = (x - z) * _R2
        s[a + 2 * step, b] = (x + z - y - y) * _R6


@encode_jit
def _line8(s, a, step, lanes):
    for b in range(lanes):
        x0, x1, x2, x3 = s[a, b], s[a + step, b], s[a + 2 * step, b], s[a + 3 * step, b]
        x4, x5, x6, x7 = s[a + 4 * step, b], s[a + 5 * step, b], s[a + 6 * step, b], s[a + 7 * step, b]
        p0, p1, p2, p3 = x0 + x7, x1 + x6, x2 + x5, x3 + x4
        m0, m1, m2, m3 = x0 - x7, x1 - x6, x2 - x5, x3 - x4
        q0, q1, r0, r1 = p0 + p3, p1 + p2, p0 - p3, p1 - p2
        s[a, b] = (q0 + q1) * _R8
        s[a + step, b] = m0 * _S1 + m1 * _S3 + m2 * _S5 + m3 * _S7
        s[a + 2 * step, b] = r0 * _S2 + r1 * _S6
        s[a + 3 * step, b] = m0 * _S3 - m1 * _S7 - m2 * _S1 - m3 * _S5
        s[a + 4 * step, b] = (q0 - q1) * _R8
        s[a + 5 * step, b] = m0 * _S5 - m1 * _S1 + m2 * _S7 + m3 * _S3
        s[a + 6 * step, b] = r0 * _S6 - r1 * _S2
        s[a + 7 * step, b] = m0 * _S7 - m1 * _S5 + m2 * _S3 - m3 * _S1


def _general_line(n: int) -> Kernel:
    cosine = (integer_basis(n) / np.float32(1 << BASIS_SHIFT)).astype(np.float32)
    width = lanes_of(n)

    @encode_jit
    def line(s, a, step, lanes):
        t = np.empty((n, width), np.float32)
        for u in range(n):
            for b in range(lanes):
                t[u, b] = cosine[u, 0] * s[a, b]
            for i in range(1, n):
                c = cosine[u, i]
                for b in range(lanes):
                    t[u, b] += c * s[a + i * step, b]
        for u in range(n):
            for b in range(lanes):
                s[a + u * step, b] = t[u, b]

    return line


def _line(n: int) -> Kernel:
    return {3: _line3, 8: _line8}.get(n) or _general_line(n)


@cache
def forward_group(n: int) -> Kernel:
    """Return `kernel(x, first, lanes, magic, s)`: snap, turn and transform one group."""
    area = n * n
    width = lanes_of(n)
    line = _line(n)

    @encode_jit
    def kernel(x, first, lanes, magic, s):
        for b in range(lanes):
            block = x[(first + b) * area : (first + b + 1) * area]
            for f in range(area):
                s[f, b] = block[f]
        for f in range(area):
            for b in range(width):
                s[f, b] = (s[f, b] + magic) - magic
        if n > 1:
            for j in range(n):
                line(s, j, n, width)
            for u in range(n):
                line(s, u * n, 1, width)

    return kernel


@decode_jit
def quantise(c, inverse_step):
    """Return the code of a coefficient that is known not to be zero."""
    level = min(max(np.int32(abs(c) * inverse_step + ROUNDING), np.int32(1)), np.int32(MAX_LEVEL))
    return level if c > 0 else -level


@cache
def inverse_block(n: int) -> Kernel:
    """Return `kernel(codes, rows, columns, t, y)`: integers of one block, exactly.

    `rows` and `columns` have a bit for each that holds a code. Sums wrap at 32 bits, on
    every backend alike; an encoder's own streams stay below.
    """
    basis = integer_basis(n)

    @decode_jit
    def kernel(codes, rows, columns, t, y):
        if n == 1:
            y[0] = np.int32(codes[0]) << np.int32(2 * BASIS_SHIFT)
            return
        for i in range(n * n):
            t[i] = 0
            y[i] = 0
        while rows:
            u = np.int64(trailing_zeros(rows))
            rows &= rows - np.uint64(1)
            row = codes[u * n : u * n + n]
            for i in range(n):
                c = basis[u, i]
                for v in range(n):
                    t[i * n + v] += np.int32(c * np.int32(row[v]))
        while columns:
            v = np.int64(trailing_zeros(columns))
            columns &= columns - np.uint64(1)
            for i in range(n):
                c = t[i * n + v]
                for j in range(n):
                    y[i * n + j] += np.int32(c * basis[v, j])

    return kernel


@decode_jit
def to_value(y, mantissa, scale):
    """Turn an integer of the inverse transform into its float: exact, see format.py."""
    return np.float32(((np.int32(y) + _HALF_STEP) >> _SHIFT) * mantissa) * scale
