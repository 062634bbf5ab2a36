"""The tensors of a bucket that travel as floats, or not at all: there may be many small ones.

They are handled together: NumPy converts all of their values at once, and compiled loops move
them between the bucket and the stream.
"""

import numpy as np
from numpy.typing import NDArray

from shoestring.codec.base import Vector
from shoestring.codec.dct.format import HALF, HINT, Geometry, Stream
from shoestring.codec.dct.jit import copy, decode_jit
from shoestring.errors import StreamError

Words = NDArray[np.uint16]


def _scales(headers: NDArray[np.void], geometry: Geometry) -> Vector:
    """Return what the floats of each tensor are multiplied by."""
    own = headers[geometry.floats.tensors]
    return np.ldexp(np.float32(1), np.where(own["kind"] == HALF, own["exponent"], 0))


def encode(values: Vector, headers: NDArray[np.void], geometry: Geometry, kept: Vector | None) -> Words:
    """Return the words of all tensors sent as floats; fill `kept` for these and those sent as zero."""
    floats = geometry.floats
    words = np.empty(floats.words, "<u2")
    if floats.tensors.size:
        scales = _scales(headers, geometry)
        own = np.empty(floats.values, np.float32)
        _gather(values, floats.starts, floats.sizes, 1 / scales, own)
        with np.errstate(over="ignore"):  # of values that are sent as float32
            half = own.astype("<f2")
        _pack(own.view("<u4"), half.view("<u2"), floats.sizes, floats.is_half, words)
        if kept is not None:
            _leave(values, floats.starts, floats.sizes, floats.is_half, scales, half.astype(np.float32), kept)
    if kept is not None:
        _copy(values, geometry.zero_starts, geometry.zero_sizes, kept)
    return words


def read(stream: Stream) -> Vector:
    """Return the values of all tensors sent as floats, end to end, or raise `StreamError`."""
    floats = stream.geometry.floats
    own = np.empty(floats.values, np.float32)
    if not floats.tensors.size:
        return own
    words = stream.payload[stream.geometry.words_at - 2 * floats.words : stream.geometry.words_at].view("<u2")
    with np.errstate(invalid="ignore"):  # a NaN is refused below
        half = words.view("<f2").astype(np.float32)
    bad = _unpack(words, half, floats.sizes, floats.is_half, _scales(stream.headers, stream.geometry), own)
    if bad >= 0:
        raise StreamError(f"tensor {floats.tensors[bad]} holds NaN or infinity", hint=HINT)
    return own


def add(own: Vector, geometry: Geometry, out: Vector, weight: np.float32) -> None:
    """Add the values that were read, times `weight`."""
    _add(own, geometry.floats.starts, geometry.floats.sizes, out, weight)


@decode_jit
def _gather(values, starts, sizes, factors, own):
    at = 0
    for k in range(starts.size):
        for i in range(sizes[k]):
            own[at + i] = values[starts[k] + i] * factors[k]
        at += sizes[k]


@decode_jit
def _pack(own, half, sizes, is_half, words):
    at = word = 0
    for k in range(sizes.size):
        for i in range(at, at + sizes[k]):
            if is_half[k]:
                words[word] = half[i]
                word += 1
            else:
                words[word], words[word + 1] = np.uint16(own[i] & 0xFFFF), np.uint16(own[i] >> 16)
                word += 2
        at += sizes[k]


@decode_jit
def _unpack(words, half, sizes, is_half, scales, own):
    """Write the values of all tensors; return the first that is not finite, or -1."""
    bits = own.view(np.uint32)
    at = word = 0
    for k in range(sizes.size):
        for i in range(at, at + sizes[k]):
            if is_half[k]:
                own[i] = half[word] * scales[k]
                word += 1
            else:
                bits[i] = np.uint32(words[word]) | np.uint32(words[word + 1]) << np.uint32(16)
                word += 2
            if not np.isfinite(own[i]):
                return k
        at += sizes[k]
    return -1


@decode_jit
def _leave(values, starts, sizes, is_half, scales, half, kept):
    at = 0
    for k in range(starts.size):
        for i in range(sizes[k]):
            value = values[starts[k] + i]
            kept[starts[k] + i] = value - half[at + i] * scales[k] if is_half[k] else np.float32(0)
        at += sizes[k]


@decode_jit
def _copy(values, starts, sizes, kept):
    for k in range(starts.size):
        copy(values, starts[k], kept, starts[k], sizes[k])


@decode_jit
def _add(own, starts, sizes, out, weight):
    at = 0
    for k in range(starts.size):
        for i in range(sizes[k]):
            out[starts[k] + i] += weight * own[at + i]
        at += sizes[k]
