"""The layout of a stream: its parts, their limits, and where each of them lies.

README.md beside this file is the specification; `stream.py` reads and writes this layout.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from shoestring.codec.base import Layout
from shoestring.codec.dct.basis import BASIS_SCALE_LOG2

CODEC_ID = 0xDC
VERSION = 2

ZERO = 0  # all values are zero; nothing follows
HALF = 1  # float16 values times a power of two
FULL = 2  # float32 values
BLOCKS = (1, 3, 4, 5, 7, 8, 16, 32)  # kind 3 + index: n x n blocks; 1 is no transform
FIRST_BLOCK_KIND = 3
KINDS = FIRST_BLOCK_KIND + len(BLOCKS)

MIN_CHUNK_LOG2, MAX_CHUNK_LOG2 = 10, 20
MIN_MANTISSA, MAX_MANTISSA = 16, 31
MIN_EXPONENT, MAX_EXPONENT = -100, 100
TILE_LOG2 = 18  # chunks as large as this or larger are whole tiles
TILE_VALUES = 1 << TILE_LOG2
MAX_GAP = (1 << 18) - 1
MAX_LEVEL = 32767
NO_CODE = MAX_LEVEL + 1  # a level that stands for a zero: it cuts a gap that is too long

# A decoded value is an integer below 2**24 times 2**(exponent - GRID_LOG2): exact.
GRID_LOG2 = 6
BASIS_SHIFT = BASIS_SCALE_LOG2
INVERSE_SHIFT = 12

PREFIX_BYTES = 4
ALIGNMENT = 4  # of the chunk headers
# A tensor header in memory; in a stream it is shorter.
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


# Columns of `Geometry.tiles`. A tile is a run of whole blocks of one tensor (the last one has the
# rest too), in planar order: all codes of the first frequency, all of the second, ..., then the
# rest. A tile has chunks of its own, from TILE_FIRST_CHUNK on, or shares one with its neighbours,
# in which it begins at TILE_OFFSET.
(
    TILE_START, TILE_BLOCKS, TILE_SIZE, TILE_SIDE, TILE_CHUNK_LOG2, TILE_FIRST_CHUNK, TILE_TENSOR,
    TILE_OFFSET, TILE_COLUMNS,
) = range(9)  # fmt: skip

# Columns of `Geometry.chunk_rows`: where a chunk begins in its (first) tile, how many codes it has,
# where the first of them lies in the bucket, and its tensor.
CHUNK_BEGIN, CHUNK_SIZE, CHUNK_START, CHUNK_TENSOR = range(4)


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

    tiles: NDArray[np.int64]  # [tiles, TILE_COLUMNS]
    chunks: int
    floats: FloatTensors
    zero_starts: NDArray[np.int64]  # of the tensors that are not sent at all
    zero_sizes: NDArray[np.int64]
    chunks_at: int  # byte offset of the chunk headers
    floats_at: int  # of the floats
    words_at: int  # of the words

    @cached_property
    def chunk_rows(self) -> NDArray[np.int64]:
        """Chunk table, [chunks, 4]. Built after a stream's length was checked, so its size is bounded."""
        return _find_chunks(self.tiles)


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


def headers_bytes(tensors: int, exponents: int, coded: int) -> int:
    """Return the bytes of prefix and headers, padding included, from the number of tensors, of those with
    an exponent, and of those coded in blocks."""
    return -(-(PREFIX_BYTES + tensors + exponents + coded) // ALIGNMENT) * ALIGNMENT


def lay_out(layout: Layout, headers: NDArray[np.void]) -> Geometry:
    """Return the geometry of a stream, from the layout and the (checked) tensor headers."""
    return _lay_out(layout, headers["kind"].tobytes(), headers["chunk_log2"].tobytes())


@lru_cache(maxsize=1024)  # a large model has hundreds of parts
def _lay_out(layout: Layout, kinds: bytes, chunk_logs: bytes) -> Geometry:
    tiles, chunks = _find_tiles(layout, kinds, chunk_logs)
    floats = _find_floats(layout, kinds)
    zero = [index for index, kind in enumerate(kinds) if kind == ZERO]
    coded = sum(kind >= FIRST_BLOCK_KIND for kind in kinds)
    chunks_at = headers_bytes(len(kinds), coded + kinds.count(HALF), coded)
    floats_at = chunks_at + CHUNK.itemsize * chunks
    return Geometry(
        tiles=tiles,
        chunks=chunks,
        floats=floats,
        zero_starts=np.array([layout.offsets[index] for index in zero], np.int64),
        zero_sizes=np.array([layout.sizes[index] for index in zero], np.int64),
        chunks_at=chunks_at,
        floats_at=floats_at,
        words_at=floats_at + 2 * floats.words,
    )


def _find_tiles(layout: Layout, kinds: bytes, chunk_logs: bytes) -> tuple[NDArray[np.int64], int]:
    """List the tiles, and say how many chunks they have."""
    rows: list[tuple[int, ...]] = []
    chunks = 0
    for index, size in enumerate(layout.sizes):
        if kinds[index] < FIRST_BLOCK_KIND or not size:
            continue
        n, chunk_log2 = block_of_kind(kinds[index]), chunk_logs[index]
        together = 1 << max(chunk_log2 - TILE_LOG2, 0)  # tiles that share a chunk
        offset = 0
        for k, (start, blocks, values) in enumerate(cut(size, n)):
            if k % together == 0:
                offset, first = 0, chunks
                chunks += -(-values // (1 << chunk_log2)) if chunk_log2 < TILE_LOG2 else 1
            place = layout.offsets[index] + start
            rows.append((place, blocks, values, n, chunk_log2, first, index, offset))
            offset += values
    return np.array(rows, np.int64).reshape(-1, TILE_COLUMNS), chunks


def _find_chunks(tiles: NDArray[np.int64]) -> NDArray[np.int64]:
    """List the chunks of all tiles."""
    logs, sizes, is_first = tiles[:, TILE_CHUNK_LOG2], tiles[:, TILE_SIZE], tiles[:, TILE_OFFSET] == 0
    is_small = logs < TILE_LOG2
    owner = np.repeat(np.arange(len(tiles)), np.where(is_small, -(-sizes >> logs), is_first))
    begins = np.where(is_small, 1 << logs, 0)[owner] * (
        np.arange(owner.size) - tiles[owner, TILE_FIRST_CHUNK]
    )
    # The size of a shared chunk is where its last tile ends.
    ends = np.zeros(owner.size, np.int64)
    np.maximum.at(ends, tiles[:, TILE_FIRST_CHUNK], tiles[:, TILE_OFFSET] + sizes)
    chunk_sizes = np.where(is_small[owner], np.minimum(1 << logs[owner], sizes[owner] - begins), ends)
    starts = tiles[owner, TILE_START] + begins
    return np.stack([begins, chunk_sizes, starts, tiles[owner, TILE_TENSOR]], axis=1)


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
