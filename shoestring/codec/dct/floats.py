"""Tensors of a bucket that are sent as floats, or not at all. A bucket may have many small ones.

All of them are handled together, in compiled loops: NumPy takes longer over a call than over a small
tensor, and its float16 has no vector code on most machines. A float16 is what IEEE 754 says, in
integers; the scale keeps it from becoming infinite.
"""

import numpy as np
from numpy.typing import NDArray

from shoestring.codec.base import Vector
from shoestring.codec.dct.format import Geometry
from shoestring.compiled.jit import copy, decode_jit

Words = NDArray[np.uint16]

_SIGN, _MAGNITUDE, _INFINITE = np.uint32(0x80000000), np.uint32(0x7FFFFFFF), np.uint32(0x7F800000)
_HALF_SIGN, _HALF_MAGNITUDE, _HALF_INFINITE = np.uint32(0x8000), np.uint32(0x7FFF), np.uint32(0x7C00)
# The smallest float16 that is not denormal, as a float32; these have 13 bits more, and exponents 112 more.
_NORMAL, _MORE_BITS, _BIAS = np.uint32(0x38800000), np.uint32(13), np.uint32(112 << 23)
_DENORMAL = np.float32(2.0**-24)  # what denormal float16 numbers count


def encode(values: Vector, headers: NDArray[np.void], geometry: Geometry, left_over: Vector | None) -> Words:
    """Return the words of all tensors sent as floats; fill `left_over` for these and those sent as zero."""
    floats = geometry.floats
    words = np.empty(floats.words, "<u2")
    target = values[:0] if left_over is None else left_over
    _pack(
        values, values.view(np.uint32), floats.starts, floats.sizes, floats.tensors, floats.is_half,
        headers.view(np.int8).reshape(-1, 4), words, target,
    )  # fmt: skip
    if left_over is not None:
        _copy(values, geometry.zero_starts, geometry.zero_sizes, target)
    return words


def add(own: Vector, geometry: Geometry, out: Vector, weight: np.float32) -> None:
    """Add values that were read (`stream.py`), times `weight`."""
    _add(own, geometry.floats.starts, geometry.floats.sizes, out, weight)


@decode_jit
def _scale(exponent):
    """Return 2**exponent, which lies between -100 and 100."""
    return np.uint32((np.int32(exponent) + 127) << 23).view(np.float32)


@decode_jit
def to_half(value, bits):
    """Return the float16 nearest to a float32 below 2**15 (given twice), ties to even, as its bits."""
    sign = (bits & _SIGN) >> np.uint32(16)
    magnitude = bits & _MAGNITUDE
    if magnitude < _NORMAL:
        return sign | np.uint32(np.rint(abs(value) / _DENORMAL))
    odd = magnitude >> _MORE_BITS & np.uint32(1)
    return sign | (magnitude + np.uint32(0xFFF) + odd - _BIAS) >> _MORE_BITS


@decode_jit
def of_half(word):
    """Return a float16 that is finite, given as its bits."""
    word = np.uint32(word)
    magnitude = word & _HALF_MAGNITUDE
    value = np.float32(magnitude) * _DENORMAL
    if magnitude >= np.uint32(0x400):
        value = np.uint32((magnitude << _MORE_BITS) + _BIAS).view(np.float32)
    return -value if word & _HALF_SIGN else value


@decode_jit
def _pack(values, bits, starts, sizes, tensors, is_half, headers, words, left_over):
    word = 0
    for k in range(starts.size):
        exponent = headers[tensors[k], 3]
        scale, inverse = _scale(exponent), _scale(-exponent)
        for i in range(starts[k], starts[k] + sizes[k]):
            if is_half[k]:
                scaled = np.float32(values[i] * inverse)
                words[word] = to_half(scaled, scaled.view(np.uint32))
                if left_over.size:
                    left_over[i] = values[i] - of_half(words[word]) * scale
                word += 1
            else:
                words[word], words[word + 1] = bits[i] & np.uint32(0xFFFF), bits[i] >> np.uint32(16)
                if left_over.size:
                    left_over[i] = 0
                word += 2


@decode_jit
def unpack(words, sizes, tensors, is_half, headers, own, bits):
    """Write the values of all tensors sent as floats; return the first that is not finite, or -1."""
    at = word = 0
    for k in range(sizes.size):
        scale = _scale(headers[tensors[k], 3])
        for i in range(at, at + sizes[k]):
            if is_half[k]:
                if words[word] & _HALF_INFINITE == _HALF_INFINITE:
                    return tensors[k]
                own[i] = of_half(words[word]) * scale
                word += 1
            else:
                bits[i] = np.uint32(words[word]) | np.uint32(words[word + 1]) << np.uint32(16)
                if bits[i] & _INFINITE == _INFINITE:
                    return tensors[k]
                word += 2
        at += sizes[k]
    return -1


@decode_jit
def _copy(values, starts, sizes, left_over):
    for k in range(starts.size):
        copy(values, starts[k], left_over, starts[k], sizes[k])


@decode_jit
def _add(own, starts, sizes, out, weight):
    at = 0
    for k in range(starts.size):
        for i in range(sizes[k]):
            out[starts[k] + i] += weight * own[at + i]
        at += sizes[k]
