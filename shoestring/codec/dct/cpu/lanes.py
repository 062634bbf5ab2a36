"""Blocks of 8 x 8 in vector registers: code that a compiler does not find in loops.

A row of a block is one vector of 8. A pass works on all columns at once; the block is then
turned in registers, and the same pass does the other direction. So frequencies come out,
and codes go in, turned: row u and column v are at place `8 * v + u`, here *lane order*.
Only the length of the vectors is assumed: machines with shorter ones take two for each.

What encoders compute may fuse multiply and add. What decoders compute are integers that
wrap and floats that are exact (README.md), so their order does not matter.
"""

import math

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from shoestring.codec.dct.basis import integer_basis
from shoestring.codec.dct.format import INVERSE_SHIFT

_BIT, _BYTE, _INT, _LONG = (ir.IntType(bits) for bits in (1, 8, 32, 64))
_FLOATS, _INTS, _SHORTS = (ir.VectorType(kind, 8) for kind in (ir.FloatType(), _INT, ir.IntType(16)))
_FUSED = ("contract",)
_SIDE = range(8)
_PLACES = range(0, 64, 8)


@intrinsic
def trailing_zeros(context, value):
    """Count the zero bits below the lowest one; undefined for 0."""

    def generate(context, builder, signature, args):
        return builder.cttz(args[0], ir.Constant(_BIT, 1))

    return types.uint64(types.uint64), generate


@intrinsic
def leading_zeros(context, value):
    """Count the zero bits above the highest one; undefined for 0."""

    def generate(context, builder, signature, args):
        return builder.ctlz(args[0], ir.Constant(_BIT, 1))

    return types.uint64(types.uint64), generate


def _constant(vector, value):
    return ir.Constant(vector, [value] * 8)


def _spread(builder, value, vector):
    """Put a number into all lanes."""
    nothing = ir.Constant(vector, ir.Undefined)
    one = builder.insert_element(nothing, value, ir.Constant(_INT, 0))
    return builder.shuffle_vector(one, nothing, _constant(_INTS, 0))


def _rows(context, builder, array_type, array, first, vector):
    """Point to eight rows of an array, from element `first` on."""
    data = cgutils.create_struct_proxy(array_type)(context, builder, array).data
    places = (builder.add(first, ir.Constant(_LONG, k)) for k in _PLACES)
    return [builder.bitcast(builder.gep(data, [place]), vector.as_pointer()) for place in places]


def _load(builder, pointers, vector, align=4):
    return [builder.load(pointer, align=align, typ=vector) for pointer in pointers]


def _turn(builder, rows):
    """Transpose: single lanes change places, then pairs, then halves."""

    def mix(a, b, low, high):
        return [builder.shuffle_vector(rows[a], rows[b], ir.Constant(_INTS, lanes)) for lanes in (low, high)]

    single = (0, 8, 1, 9, 4, 12, 5, 13), (2, 10, 3, 11, 6, 14, 7, 15)
    pairs = (0, 1, 8, 9, 4, 5, 12, 13), (2, 3, 10, 11, 6, 7, 14, 15)
    halves = (0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15)
    rows = [row for k in (0, 2, 4, 6) for row in mix(k, k + 1, *single)]
    rows = [row for k in (0, 1, 4, 5) for row in mix(k, k + 2, *pairs)]
    mixed = [mix(k, k + 4, *halves) for k in (0, 1, 2, 3)]
    return [low for low, _ in mixed] + [high for _, high in mixed]


def _forward(builder, x):
    """Emit the cosine transform of eight vectors."""

    def add(a, b):
        return builder.fadd(a, b, flags=_FUSED)

    def sub(a, b):
        return builder.fsub(a, b, flags=_FUSED)

    def mul(a, factor):
        return builder.fmul(a, _constant(_FLOATS, factor), flags=_FUSED)

    def weigh(terms, factors):
        total = mul(terms[0], factors[0])
        for term, factor in zip(terms[1:], factors[1:], strict=True):
            total = add(total, mul(term, factor))
        return total

    s = [math.cos(math.pi * k / 16) / 2 for k in range(9)]
    even = [add(x[k], x[7 - k]) for k in range(4)]
    odd = [sub(x[k], x[7 - k]) for k in range(4)]
    sums = [add(even[k], even[3 - k]) for k in range(2)]
    differences = [sub(even[k], even[3 - k]) for k in range(2)]
    return [
        mul(add(*sums), math.sqrt(1 / 8)),
        weigh(odd, (s[1], s[3], s[5], s[7])),
        weigh(differences, (s[2], s[6])),
        weigh(odd, (s[3], -s[7], -s[1], -s[5])),
        mul(sub(*sums), math.sqrt(1 / 8)),
        weigh(odd, (s[5], -s[1], s[7], s[3])),
        weigh(differences, (s[6], -s[2])),
        weigh(odd, (s[7], -s[5], s[3], -s[1])),
    ]


def _snap(builder, rows, magic):
    magic = _spread(builder, magic, _FLOATS)
    return [builder.fsub(builder.fadd(row, magic), magic) for row in rows]


def _mask(builder, rows, threshold):
    """Emit a word with a bit for each of 64 floats: is its magnitude at least the threshold?"""
    threshold = _spread(builder, threshold, _FLOATS)
    mask = ir.Constant(_LONG, 0)
    for place, row in zip(_PLACES, rows, strict=True):
        magnitude = builder.and_(builder.bitcast(row, _INTS), _constant(_INTS, 0x7FFFFFFF))
        reached = builder.fcmp_ordered(">=", builder.bitcast(magnitude, _FLOATS), threshold)
        bits = builder.zext(builder.bitcast(reached, _BYTE), _LONG)
        mask = builder.or_(mask, builder.shl(bits, ir.Constant(_LONG, place)))
    return mask


@intrinsic
def large_64(context, x, first, magic, threshold):
    """Return which of 64 values, from `x[first]` on and snapped, reach the threshold."""

    def generate(context, builder, signature, args):
        values, first, magic, threshold = args
        rows = _load(builder, _rows(context, builder, signature.args[0], values, first, _FLOATS), _FLOATS)
        return _mask(builder, _snap(builder, rows, magic), threshold)

    return types.uint64(x, types.int64, types.float32, types.float32), generate


@intrinsic
def transform_8(context, x, first, magic, threshold, z):
    """Snap and transform the block at `x[first]` into `z`; return which reach the threshold.

    Both `z` and the bits are in lane order.
    """

    def generate(context, builder, signature, args):
        values, first, magic, threshold, out = args
        rows = _load(builder, _rows(context, builder, signature.args[0], values, first, _FLOATS), _FLOATS)
        rows = _forward(builder, _turn(builder, _forward(builder, _snap(builder, rows, magic))))
        start = ir.Constant(_LONG, 0)
        for row, pointer in zip(
            rows, _rows(context, builder, signature.args[4], out, start, _FLOATS), strict=True
        ):
            builder.store(row, pointer, align=4)
        return _mask(builder, rows, threshold)

    return types.uint64(x, types.int64, types.float32, types.float32, z), generate


def _inverse(builder, x):
    """Emit the integer inverse of eight vectors; sums wrap."""

    def weigh(terms, factors):
        total = None
        for term, factor in zip(terms, factors, strict=True):
            product = builder.mul(term, _constant(_INTS, factor))
            total = product if total is None else builder.add(total, product)
        return total

    c = integer_basis(8)[:, 0].tolist()
    sum_, difference = builder.add(x[0], x[4]), builder.sub(x[0], x[4])
    p, q = weigh([sum_], [c[0]]), weigh([difference], [c[0]])
    r, t = weigh([x[2], x[6]], [c[2], c[6]]), weigh([x[2], x[6]], [c[6], -c[2]])
    even = [builder.add(p, r), builder.add(q, t), builder.sub(q, t), builder.sub(p, r)]
    odd = [
        weigh(x[1::2], factors)
        for factors in (
            (c[1], c[3], c[5], c[7]),
            (c[3], -c[7], -c[1], -c[5]),
            (c[5], -c[1], c[7], c[3]),
            (c[7], -c[5], c[3], -c[1]),
        )
    ]
    first = [builder.add(e, o) for e, o in zip(even, odd, strict=True)]
    last = [builder.sub(e, o) for e, o in zip(even, odd, strict=True)]
    return first + last[::-1]


@intrinsic
def inverse_8(context, codes, first, mantissa, scale, values):
    """Turn 64 codes, from `codes[first]` on and in lane order, into the values of their block."""

    def generate(context, builder, signature, args):
        codes, first, mantissa, scale, out = args
        pointers = _rows(context, builder, signature.args[0], codes, first, _SHORTS)
        rows = [builder.sext(row, _INTS) for row in _load(builder, pointers, _SHORTS, align=2)]
        rows = _inverse(builder, _turn(builder, _inverse(builder, rows)))
        mantissa, scale = _spread(builder, mantissa, _INTS), _spread(builder, scale, _FLOATS)
        start = ir.Constant(_LONG, 0)
        for row, pointer in zip(
            rows, _rows(context, builder, signature.args[4], out, start, _FLOATS), strict=True
        ):
            half = builder.and_(builder.ashr(row, _constant(_INTS, INVERSE_SHIFT - 1)), _constant(_INTS, 1))
            rounded = builder.add(builder.ashr(row, _constant(_INTS, INVERSE_SHIFT)), half)
            value = builder.sitofp(builder.mul(rounded, mantissa), _FLOATS)
            builder.store(builder.fmul(value, scale), pointer, align=4)
        return context.get_dummy_value()

    return types.void(codes, types.int64, types.int32, types.float32, values), generate
