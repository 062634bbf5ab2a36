"""Where each GPU program finds its work: small index arrays, made once a layout and kept.

A bucket of many tensors is coded by a handful of launches. Each program looks up which
tile, segment or chunk it is for.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoestring.codec.base import Layout
from shoestring.codec.dct import format as stream

PLAIN_LENGTH = 4096
PIECE_LENGTH = 2048
LANES = 32
BLOCKS_A_GROUP = 64


@dataclass(frozen=True)
class Tile:
    """How the matrix product of an n x n block is cut."""

    depth: int  # the area, padded to a power of two of at least 16
    side: int  # of the pieces of the matrix

    @property
    def columns(self) -> int:
        return self.depth // self.side


def tile_of(n: int) -> Tile:
    depth = max(16, 1 << (n * n - 1).bit_length())
    return Tile(depth, min(depth, 64))


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """Copy a small array to the device."""
    return torch.from_numpy(np.array(array)).to(device)


@dataclass(frozen=True)
class Groups:
    """The programs that transform blocks of one size."""

    tile: Tensor
    first: Tensor
    blocks: int
    count: int


@dataclass(frozen=True)
class Segments:
    """Runs of values that programs of `length` handle one each."""

    start: Tensor
    size: Tensor
    tensor: Tensor
    length: int
    count: int


@dataclass(frozen=True)
class Floats:
    """Segments of the tensors that are sent as floats."""

    owner: NDArray[np.int64]
    start: Tensor
    size: Tensor
    value_start: Tensor  # among the values of all such tensors
    word_start: Tensor  # among their 16-bit words in the stream
    length: int
    count: int

    def scales(self, headers: NDArray[np.void]) -> NDArray[np.float32]:
        """Return each segment's scale; 0 stands for float32."""
        scale = np.where(headers["kind"] == stream.HALF, np.ldexp(1.0, headers["exponent"].astype(int)), 0.0)
        return scale[self.owner].astype(np.float32)


@dataclass(frozen=True)
class Pieces:
    """Chunks cut into pieces whose codes are listed at once."""

    start: Tensor
    size: Tensor
    offset: Tensor  # in the chunk
    first: Tensor  # the first piece of each chunk, and the number of pieces
    count: int


@dataclass(frozen=True)
class Places:
    """All index arrays of a bucket with given forms and chunk sizes."""

    start: Tensor  # a tile
    blocks: Tensor
    tensor: Tensor
    groups: dict[int, Groups]
    plain: Segments
    floats: Floats
    chunk_start: Tensor
    chunk_size: Tensor
    chunks: int
    order: Tensor  # chunks by falling size: neighbours take about as long
    pieces: Pieces
    lane_base: Tensor  # where each group of `LANES` chunks has room for its codes
    lane_room: int
    chunk_tensor: NDArray[np.int64]
    chunk_sizes: NDArray[np.int64]

    def word_room(self, bits: NDArray[np.float64]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Return where each chunk's room for words ends and begins, for this many bits a value."""
        room = (self.chunk_sizes * bits[self.chunk_tensor] / 16).astype(np.int64) + 64
        top = np.cumsum(room)
        return top.astype(np.int32), (top - room).astype(np.int32)


def find_places(layout: Layout, headers: NDArray[np.void], device: torch.device) -> Places:
    return _find(layout, headers["kind"].tobytes(), headers["chunk_log2"].tobytes(), device)


@lru_cache(maxsize=64)
def _find(layout: Layout, kinds: bytes, chunk_logs: bytes, device: torch.device) -> Places:
    headers = np.zeros(len(layout.sizes), stream.TENSOR)
    headers["kind"] = np.frombuffer(kinds, np.uint8)
    headers["chunk_log2"] = np.frombuffer(chunk_logs, np.uint8)
    tiles = stream.lay_out(layout, headers).tiles
    side = tiles[:, stream.TILE_SIDE]
    blocks = np.where(side > 1, tiles[:, stream.TILE_BLOCKS], 0)

    groups = {}
    for n in np.unique(side[side > 1]).tolist():
        chosen = np.flatnonzero((side == n) & (blocks > 0))
        if chosen.size:
            groups[n] = group_blocks(n, chosen, blocks[chosen], device)

    chunk_size = 1 << tiles[:, stream.TILE_CHUNK_LOG2]
    tile, first, length = cut(tiles[:, stream.TILE_SIZE], chunk_size)
    lane_sizes = -np.sort(-length)[::LANES] * LANES  # the longest of each group, for all of its lanes
    return Places(
        start=to_device(tiles[:, stream.TILE_START], device),
        blocks=_index(tiles[:, stream.TILE_BLOCKS], device),
        tensor=_index(tiles[:, stream.TILE_TENSOR], device),
        groups=groups,
        plain=_plain(tiles, blocks * side * side, device),
        floats=_floats(layout, headers, device),
        chunk_start=to_device(tiles[tile, stream.TILE_START] + first, device),
        chunk_size=_index(length, device),
        chunks=tile.size,
        order=to_device(np.argsort(-length, kind="stable"), device),
        pieces=_pieces(tiles[tile, stream.TILE_START] + first, length, device),
        lane_base=to_device(np.cumsum(lane_sizes) - lane_sizes, device),
        lane_room=int(lane_sizes.sum()),
        chunk_tensor=tiles[tile, stream.TILE_TENSOR],
        chunk_sizes=length,
    )


def group_blocks(n: int, tiles: NDArray[np.int64], blocks: NDArray[np.int64], device: torch.device) -> Groups:
    """Cut the blocks of some tiles into groups, one a program."""
    owner, first, _ = cut(blocks, BLOCKS_A_GROUP)
    return Groups(_index(tiles[owner], device), _index(first, device), BLOCKS_A_GROUP, owner.size)


def _index(array: NDArray[np.int64], device: torch.device) -> Tensor:
    return to_device(array.astype(np.int32), device)


def cut(
    sizes: NDArray[np.int64], length: NDArray[np.int64] | int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Cut runs into pieces of at most `length`: (which run, where in it, how long)."""
    counts = -(-sizes // length)
    owner = np.repeat(np.arange(sizes.size), counts)
    each = np.repeat(np.broadcast_to(length, sizes.shape), counts)
    first = (np.arange(owner.size) - np.repeat(np.cumsum(counts) - counts, counts)) * each
    return owner, first, np.minimum(each, sizes[owner] - first)


def _pieces(starts: NDArray[np.int64], sizes: NDArray[np.int64], device: torch.device) -> Pieces:
    owner, offset, size = cut(sizes, PIECE_LENGTH)
    return Pieces(
        start=to_device(starts[owner] + offset, device),
        size=_index(size, device),
        offset=_index(offset, device),
        first=to_device(np.searchsorted(owner, np.arange(sizes.size + 1)), device),
        count=owner.size,
    )


def _plain(tiles: NDArray[np.int64], covered: NDArray[np.int64], device: torch.device) -> Segments:
    """Cut what no block covers: tiles without a transform, and rests."""
    owner, first, size = cut(tiles[:, stream.TILE_SIZE] - covered, PLAIN_LENGTH)
    return Segments(
        start=to_device(tiles[owner, stream.TILE_START] + covered[owner] + first, device),
        size=_index(size, device),
        tensor=_index(tiles[owner, stream.TILE_TENSOR], device),
        length=PLAIN_LENGTH,
        count=owner.size,
    )


def _floats(layout: Layout, headers: NDArray[np.void], device: torch.device) -> Floats:
    chosen = np.flatnonzero((headers["kind"] == stream.HALF) | (headers["kind"] == stream.FULL))
    sizes = np.array(layout.sizes, np.int64)[chosen]
    width = np.where(headers["kind"][chosen] == stream.HALF, 1, 2)
    owner, first, size = cut(sizes, PLAIN_LENGTH)
    value_start = (np.cumsum(sizes) - sizes)[owner] + first
    word_start = (np.cumsum(sizes * width) - sizes * width)[owner] + first * width[owner]
    return Floats(
        owner=chosen[owner],
        start=to_device(np.array(layout.offsets, np.int64)[chosen[owner]] + first, device),
        size=_index(size, device),
        value_start=_index(value_start, device),
        word_start=_index(word_start, device),
        length=PLAIN_LENGTH,
        count=owner.size,
    )
