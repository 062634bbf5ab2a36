"""A stream as bytes: the one reader and the one writer of its headers, for all backends.

`parse` checks everything that can be checked without decoding symbols and hands out arrays of
fixed types; a backend reads no length that `parse` has not checked. It is compiled:
NumPy takes longer over the headers of a small part than a decoder over its codes.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoestring.codec.base import Layout, Payload, Vector
from shoestring.codec.dct import format as fmt
from shoestring.codec.dct.floats import unpack
from shoestring.codec.dct.steps import STEP_COLUMNS, Steps, steps_of_decoder
from shoestring.compiled.jit import decode_jit
from shoestring.errors import StreamError

_LOW_BITS = 4  # of a byte that a mantissa takes, below the size of chunks
_LOW = (1 << _LOW_BITS) - 1

# Errors in the beginning of a stream; a number from 0 on names a tensor whose header is wrong.
_FINE, _SHORT, _OTHER_CODEC, _OTHER_VERSION, _OTHER_COUNT = -1, -2, -3, -4, -5


@dataclass(frozen=True)
class Stream:
    """A parsed stream: every length in it has been checked against the layout."""

    headers: NDArray[np.void]  # fmt.TENSOR, one a tensor
    geometry: fmt.Geometry
    steps: Steps
    floats: Vector  # the values of all tensors sent as floats, end to end
    chunks: NDArray[np.uint32]  # fmt.CHUNK
    word_starts: NDArray[np.int64]  # [chunks + 1]
    words: NDArray[np.uint16]


def parse(payload: Payload, layout: Layout) -> Stream:
    """Check a payload's structure; symbols are checked when they are decoded."""
    tensors = len(layout.sizes)
    fields = np.zeros((tensors, fmt.TENSOR.itemsize), np.uint8)
    problem = _read_headers(payload, fields)
    if problem != _FINE:
        raise _refusal(problem, payload, tensors)
    headers = fields.reshape(-1).view(fmt.TENSOR)
    geometry = fmt.lay_out(layout, headers)
    if payload.size < geometry.words_at:
        raise StreamError(f"{payload.size} bytes, at least {geometry.words_at} expected", hint=fmt.HINT)
    chunks = _aligned(payload[geometry.chunks_at : geometry.floats_at].view(fmt.CHUNK))
    words = _aligned(payload[geometry.floats_at : payload.size - payload.size % 2].view("<u2"))
    floats = geometry.floats
    word_starts = np.empty(geometry.chunks + 1, np.int64)
    steps = np.zeros((tensors, STEP_COLUMNS), np.float32)
    own = np.empty(floats.values, np.float32)
    bad = _read_rest(
        fields, chunks, words, floats.sizes, floats.tensors, floats.is_half, word_starts, steps, own,
        own.view(np.uint32),
    )  # fmt: skip
    expected = geometry.words_at + 2 * int(word_starts[-1])
    if payload.size != expected:
        raise StreamError(f"{payload.size} bytes, but the chunks add up to {expected}", hint=fmt.HINT)
    if bad >= 0:
        raise StreamError(f"tensor {bad} holds NaN or infinity", hint=fmt.HINT)
    return Stream(headers, geometry, steps, own, chunks, word_starts, words[floats.words :])


def new_payload(headers: NDArray[np.void], geometry: fmt.Geometry, size: int) -> Payload:
    """Return a payload of `size` bytes, with prefix and tensor headers already written."""
    payload = np.empty(size, np.uint8)
    _write_headers(headers.view(np.uint8).reshape(-1, fmt.TENSOR.itemsize), payload[: geometry.chunks_at])
    return payload


def join(
    headers: NDArray[np.void],
    geometry: fmt.Geometry,
    chunks: NDArray[np.uint32],
    floats: NDArray[np.uint16],
    words: NDArray[np.uint16],
) -> Payload:
    """Join the parts of a stream."""
    payload = new_payload(headers, geometry, geometry.words_at + words.nbytes)
    np.concatenate(
        [part.view(np.uint8) for part in (chunks, floats, words)], out=payload[geometry.chunks_at :]
    )
    return payload


def _aligned(array: NDArray[Any]) -> NDArray[Any]:
    """Return an array that kernels are compiled for: a payload may begin anywhere in memory."""
    if not array.flags.aligned:
        writeable, array = array.flags.writeable, array.copy()
        array.flags.writeable = writeable
    return array


def _refusal(problem: int, payload: Payload, tensors: int) -> StreamError:
    if problem == _SHORT:
        return StreamError(
            f"{payload.size} bytes are too few for the headers of {tensors} tensors", hint=fmt.HINT
        )
    if problem == _OTHER_CODEC:
        text = f"the first byte is {payload[0]}, not {fmt.CODEC_ID}: not a dct stream"
        return StreamError(text, hint=fmt.HINT)
    if problem == _OTHER_VERSION:
        return StreamError(
            f"the stream is version {payload[1]}, this is version {fmt.VERSION}",
            hint="run the same version of shoestring on every host",
        )
    if problem == _OTHER_COUNT:
        counted = int(payload[2]) | int(payload[3]) << 8
        return StreamError(f"the stream has {counted} tensors, the layout {tensors}", hint=fmt.HINT)
    return StreamError(f"the header of tensor {problem} is out of range", hint=fmt.HINT)


@decode_jit
def _read_headers(payload, fields):
    """Write kind, chunk_log2, mantissa and exponent of all tensors; return what is wrong, or _FINE."""
    tensors = fields.shape[0]
    if payload.size < fmt.PREFIX_BYTES:
        return _SHORT
    if payload[0] != fmt.CODEC_ID:
        return _OTHER_CODEC
    if payload[1] != fmt.VERSION:
        return _OTHER_VERSION
    if payload[2] | np.int64(payload[3]) << 8 != tensors & 0xFFFF:
        return _OTHER_COUNT
    if payload.size < fmt.PREFIX_BYTES + tensors:
        return _SHORT
    at = fmt.PREFIX_BYTES + tensors
    for t in range(tensors):
        kind = payload[fmt.PREFIX_BYTES + t]
        fields[t, 0] = kind
        if kind >= fmt.KINDS:
            return t
        if kind == fmt.HALF or kind >= fmt.FIRST_BLOCK_KIND:
            if at >= payload.size:
                return _SHORT
            fields[t, 3] = payload[at]
            at += 1
            exponent = np.int8(fields[t, 3])
            if exponent < fmt.MIN_EXPONENT or exponent > fmt.MAX_EXPONENT:
                return t
    for t in range(tensors):
        if fields[t, 0] >= fmt.FIRST_BLOCK_KIND:
            if at >= payload.size:
                return _SHORT
            fields[t, 1] = fmt.MIN_CHUNK_LOG2 + (payload[at] >> _LOW_BITS)
            fields[t, 2] = fmt.MIN_MANTISSA + (payload[at] & _LOW)
            at += 1
            if fields[t, 1] > fmt.MAX_CHUNK_LOG2:
                return t
    return _FINE


@decode_jit
def _read_rest(fields, chunks, words, sizes, tensors, is_half, word_starts, steps, own, bits):
    """Write where words begin, steps and floats; return the tensor with a float that is none, or -1."""
    total = 0
    for c in range(chunks.size):
        word_starts[c] = total
        total += np.int64(chunks[c] & fmt.MAX_WORDS)
    word_starts[chunks.size] = total
    steps_of_decoder(fields, steps)
    return unpack(words, sizes, tensors, is_half, fields.view(np.int8), own, bits)


@decode_jit
def _write_headers(fields, out):
    tensors = fields.shape[0]
    out[0], out[1], out[2], out[3] = fmt.CODEC_ID, fmt.VERSION, tensors & 255, tensors >> 8 & 255
    out[max(out.size - fmt.ALIGNMENT, fmt.PREFIX_BYTES) :] = 0  # padding, most likely
    at = fmt.PREFIX_BYTES + tensors
    for t in range(tensors):
        kind = fields[t, 0]
        out[fmt.PREFIX_BYTES + t] = kind
        if kind == fmt.HALF or kind >= fmt.FIRST_BLOCK_KIND:
            out[at] = fields[t, 3]
            at += 1
    for t in range(tensors):
        if fields[t, 0] >= fmt.FIRST_BLOCK_KIND:
            out[at] = fields[t, 1] - fmt.MIN_CHUNK_LOG2 << _LOW_BITS | fields[t, 2] - fmt.MIN_MANTISSA
            at += 1
