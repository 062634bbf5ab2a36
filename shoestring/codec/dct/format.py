"""The stream: its parts, their limits, and the one parser that all backends share.

README.md beside this file is the specification. `parse` checks everything that
can be checked without decoding symbols and hands out arrays of fixed types; a
backend never looks at a length that it has not been through.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoestring.codec.base import Layout, Payload
from shoestring.codec.dct.basis import BASIS_SCALE_LOG2
from shoestring.errors import StreamError

CODEC_ID = 0xDC
VERSION = 1

ZERO = 0  # all values are zero; nothing follows
HALF = 1  # float16 values times a power of two
FULL = 2  # float32 values
BLOCKS = (1, 3, 4, 5, 7, 8, 16, 32)  # kind 3 + index: n x n blocks; 1 is no transform
FIRST_BLOCK_KIND = 3
KINDS = FIRST_BLOCK_KIND + len(BLOCKS)

MIN_CHUNK_LOG2, MAX_CHUNK_LOG2 = 10, 18
MIN_MANTISSA, MAX_MANTISSA = 16, 31
MIN_EXPONENT, MAX_EXPONENT = -100, 100
TILE_VALUES = 1 << 18
MAX_LEVEL = 32767

# A decoded value is an integer below 2**24 times 2**(exponent - GRID_LOG2): exact.
GRID_LOG2 = 6
BASIS_SHIFT = BASIS_SCALE_LOG2
INVERSE_SHIFT = 12

PREFIX = np.dtype([("codec", "u1"), ("version", "u1"), ("tensors", "<u2")])
TENSOR = np.dtype([("kind", "u1"), ("chunk_log2", "u1"), ("mantissa", "u1"), ("exponent", "i1")])
CHUNK = np.dtype("<u4")  # bits 0-17: words, 18-24: gap table, 25-31: level table
MAX_WORDS = (1 << 18) - 1
# One code takes at most 4 words, so this many in a chunk always fit, with states and tail.
MAX_NONZERO = MAX_WORDS // 4 - 2
SAFE_CHUNK_LOG2 = 15  # chunks this small can hold a code at every place
STATE_WORDS = 4  # a chunk that is not empty begins with its two states

HINT = "the bytes are damaged, or come from another codec, layout or version"


def kind_of_block(n: int) -> int:
    return FIRST_BLOCK_KIND + BLOCKS.index(n)


def block_of_kind(kind: int) -> int:
    return BLOCKS[kind - FIRST_BLOCK_KIND]


# Columns of `Geometry.tiles`. A tile is a run of whole blocks of one tensor (the last
# one has the rest too), coded on its own in planar order: all codes of the first
# frequency, all of the second, ..., then the rest.
TILE_START, TILE_BLOCKS, TILE_SIZE, TILE_SIDE, TILE_CHUNK_LOG2, TILE_FIRST_CHUNK, TILE_TENSOR = range(7)


@dataclass(frozen=True, eq=False)
class Geometry:
    """Where the parts of a stream with given tensor headers lie. Equal only to itself."""

    tiles: NDArray[np.int64]  # [tiles, 7]
    chunks: int
    raw: tuple[tuple[int, int], ...]  # (tensor, byte offset) of each HALF or FULL tensor
    chunks_at: int  # byte offset of the chunk headers
    words_at: int  # byte offset of the words


def cut(size: int, n: int) -> list[tuple[int, int, int]]:
    """Cut a tensor into tiles: (start, blocks, size) each."""
    area = n * n
    blocks = size // area
    if blocks == 0:
        return [(0, 0, size)]
    per_tile = TILE_VALUES // area
    tiles = []
    for first in range(0, blocks, per_tile):
        count = min(per_tile, blocks - first)
        tiles.append((first * area, count, count * area))
    start, count, values = tiles[-1]
    tiles[-1] = (start, count, values + size % area)
    return tiles


def lay_out(layout: Layout, headers: NDArray[np.void]) -> Geometry:
    """Say where everything lies, from the layout and the (checked) tensor headers."""
    return _lay_out(layout, headers["kind"].tobytes(), headers["chunk_log2"].tobytes())


@lru_cache(maxsize=256)
def _lay_out(layout: Layout, kinds: bytes, chunk_logs: bytes) -> Geometry:
    rows: list[tuple[int, ...]] = []
    raw: list[tuple[int, int]] = []
    chunks, raw_bytes = 0, 0
    for index, size in enumerate(layout.sizes):
        kind, chunk_log2 = kinds[index], chunk_logs[index]
        if kind >= FIRST_BLOCK_KIND:
            n = block_of_kind(kind)
            for start, blocks, values in cut(size, n):
                rows.append((layout.offsets[index] + start, blocks, values, n, chunk_log2, chunks, index))
                chunks += -(-values // (1 << chunk_log2))
        elif kind != ZERO:
            raw.append((index, raw_bytes))
            raw_bytes += size * (2 if kind == HALF else 4)
    chunks_at = PREFIX.itemsize + TENSOR.itemsize * len(layout.sizes)
    raw_at = chunks_at + CHUNK.itemsize * chunks
    return Geometry(
        tiles=np.array(rows, np.int64).reshape(-1, 7),
        chunks=chunks,
        raw=tuple((index, raw_at + at) for index, at in raw),
        chunks_at=chunks_at,
        words_at=raw_at + raw_bytes,
    )


@dataclass(frozen=True)
class Stream:
    """A parsed stream: every length in it has been checked against the layout."""

    headers: NDArray[np.void]  # TENSOR, one a tensor
    geometry: Geometry
    chunks: NDArray[np.uint32]  # CHUNK
    word_starts: NDArray[np.int64]  # [chunks + 1]
    words: NDArray[np.uint16]
    payload: Payload


def parse(payload: Payload, layout: Layout) -> Stream:
    """Check a payload's structure; symbols are checked when they are decoded."""
    tensors = len(layout.sizes)
    headers_end = PREFIX.itemsize + TENSOR.itemsize * tensors
    if payload.size < headers_end:
        raise StreamError(f"{payload.size} bytes are too few for the headers of {tensors} tensors", hint=HINT)
    codec, version, counted = payload[: PREFIX.itemsize].view(PREFIX)[0].item()
    if codec != CODEC_ID:
        raise StreamError(f"the first byte is {codec}, not {CODEC_ID}: not a dct stream", hint=HINT)
    if version != VERSION:
        raise StreamError(
            f"the stream is version {version}, this is version {VERSION}",
            hint="run the same version of shoestring on every host",
        )
    if counted != tensors & 0xFFFF:
        raise StreamError(f"the stream has {counted} tensors, the layout {tensors}", hint=HINT)
    headers = payload[PREFIX.itemsize : headers_end].view(TENSOR)
    _check_headers(headers)
    geometry = lay_out(layout, headers)
    if payload.size < geometry.words_at:
        raise StreamError(f"{payload.size} bytes, at least {geometry.words_at} expected", hint=HINT)
    chunks = payload[geometry.chunks_at :][: CHUNK.itemsize * geometry.chunks].view(CHUNK)
    word_starts = np.zeros(geometry.chunks + 1, np.int64)
    (chunks & MAX_WORDS).cumsum(out=word_starts[1:])
    expected = geometry.words_at + 2 * int(word_starts[-1])
    if payload.size != expected:
        raise StreamError(f"{payload.size} bytes, but the chunks add up to {expected}", hint=HINT)
    words = payload[geometry.words_at :].view("<u2")
    return Stream(headers, geometry, chunks, word_starts, words, payload)


def _limits() -> tuple[NDArray[np.int16], NDArray[np.int16]]:
    """The least and the most of each field of a header, by its kind."""
    least = np.tile(np.array([0, 0, 0, -128], np.int16), (256, 1))
    most = np.tile(np.array([255, 255, 255, 127], np.int16), (256, 1))
    most[KINDS:, 0] = -1  # no such kind
    least[HALF:, 3], most[HALF:, 3] = MIN_EXPONENT, MAX_EXPONENT
    least[FIRST_BLOCK_KIND:, 1:3] = MIN_CHUNK_LOG2, MIN_MANTISSA
    most[FIRST_BLOCK_KIND:, 1:3] = MAX_CHUNK_LOG2, MAX_MANTISSA
    return least, most


_LEAST, _MOST = _limits()


def _check_headers(headers: NDArray[np.void]) -> None:
    fields = headers.view(np.uint8).reshape(-1, TENSOR.itemsize).astype(np.int16)
    fields[:, 3] = headers["exponent"]  # the one with a sign
    kinds = fields[:, 0]
    valid = (fields >= _LEAST[kinds]) & (fields <= _MOST[kinds])
    if not valid.all():
        raise StreamError(f"the header of tensor {int(np.argmin(valid.all(1)))} is out of range", hint=HINT)


def raw_values(stream: Stream, layout: Layout) -> list[tuple[int, NDArray[np.float32]]]:
    """Return (start, values) of the tensors that are sent as plain floats."""
    tensors: list[tuple[int, NDArray[np.float32]]] = []
    kinds = stream.headers["kind"].tolist()
    # Tensors of one kind lie end to end and are read together: there may be many small ones.
    for kind, run in groupby(stream.geometry.raw, lambda entry: kinds[entry[0]]):
        entries = list(run)
        indices = [index for index, _ in entries]
        sizes = [layout.sizes[index] for index in indices]
        body = stream.payload[entries[0][1] :]
        if kind == HALF:
            scale = np.repeat(np.ldexp(np.float32(1), stream.headers["exponent"][indices]), sizes)
            with np.errstate(invalid="ignore"):  # a NaN is refused below
                values = body[: 2 * scale.size].view("<f2").astype(np.float32) * scale
        else:
            values = body[: 4 * sum(sizes)].view("<f4").astype(np.float32)
        ends = list(accumulate(sizes))
        if not np.isfinite(values).all():
            bad = bisect_right(ends, int(np.argmin(np.isfinite(values))))
            raise StreamError(f"tensor {indices[bad]} holds NaN or infinity", hint=HINT)
        tensors += [
            (layout.offsets[index], values[end - size : end])
            for index, size, end in zip(indices, sizes, ends, strict=True)
        ]
    return tensors


def join(
    headers: NDArray[np.void],
    chunks: NDArray[np.uint32],
    raw: Sequence[NDArray[Any]],
    words: Sequence[NDArray[np.uint16]],
) -> Payload:
    """Join the parts of a stream."""
    prefix = np.array([(CODEC_ID, VERSION, len(headers) & 0xFFFF)], PREFIX)
    parts = [prefix, headers, chunks, *raw, *words]
    return np.concatenate([part.view(np.uint8) for part in parts])
