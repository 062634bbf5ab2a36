"""The stream: its parts, their limits, and the one parser that all backends share.

README.md beside this file is the specification. `parse` checks everything that
can be checked without decoding symbols and hands out arrays of fixed types; a
backend never looks at a length that it has not been through.
"""

from dataclasses import dataclass
from functools import lru_cache

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


@dataclass(frozen=True)
class FloatTensors:
    """The tensors that are sent as floats: HALF or FULL."""

    tensors: NDArray[np.int64]
    starts: NDArray[np.int64]  # among the values of the bucket
    sizes: NDArray[np.int64]
    is_half: NDArray[np.bool_]
    values: int
    words: int  # of 16 bits, in the stream


@dataclass(frozen=True, eq=False)
class Geometry:
    """Where the parts of a stream with given tensor headers lie. Equal only to itself."""

    tiles: NDArray[np.int64]  # [tiles, 7]
    chunks: int
    floats: FloatTensors
    zero_starts: NDArray[np.int64]  # of the tensors that are not sent at all
    zero_sizes: NDArray[np.int64]
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


@lru_cache(maxsize=1024)  # a large model has hundreds of parts
def _lay_out(layout: Layout, kinds: bytes, chunk_logs: bytes) -> Geometry:
    rows: list[tuple[int, ...]] = []
    chunks = 0
    for index, size in enumerate(layout.sizes):
        kind, chunk_log2 = kinds[index], chunk_logs[index]
        if kind >= FIRST_BLOCK_KIND:
            n = block_of_kind(kind)
            for start, blocks, values in cut(size, n):
                rows.append((layout.offsets[index] + start, blocks, values, n, chunk_log2, chunks, index))
                chunks += -(-values // (1 << chunk_log2))
    floats = _find_floats(layout, kinds)
    zero = [index for index, kind in enumerate(kinds) if kind == ZERO]
    chunks_at = PREFIX.itemsize + TENSOR.itemsize * len(layout.sizes)
    return Geometry(
        tiles=np.array(rows, np.int64).reshape(-1, 7),
        chunks=chunks,
        floats=floats,
        zero_starts=np.array([layout.offsets[index] for index in zero], np.int64),
        zero_sizes=np.array([layout.sizes[index] for index in zero], np.int64),
        chunks_at=chunks_at,
        words_at=chunks_at + CHUNK.itemsize * chunks + 2 * floats.words,
    )


def _find_floats(layout: Layout, kinds: bytes) -> FloatTensors:
    chosen = [index for index, kind in enumerate(kinds) if kind in (HALF, FULL)]
    sizes = [layout.sizes[index] for index in chosen]
    is_half = [kinds[index] == HALF for index in chosen]
    return FloatTensors(
        tensors=np.array(chosen, np.int64),
        starts=np.array([layout.offsets[index] for index in chosen], np.int64),
        sizes=np.array(sizes, np.int64),
        is_half=np.array(is_half, np.bool_),
        values=sum(sizes),
        words=sum(size if half else 2 * size for size, half in zip(sizes, is_half, strict=True)),
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


def join(
    headers: NDArray[np.void],
    chunks: NDArray[np.uint32],
    floats: NDArray[np.uint16],
    words: NDArray[np.uint16],
) -> Payload:
    """Join the parts of a stream."""
    prefix = np.array([(CODEC_ID, VERSION, len(headers) & 0xFFFF)], PREFIX)
    return np.concatenate([part.view(np.uint8) for part in (prefix, headers, chunks, floats, words)])
