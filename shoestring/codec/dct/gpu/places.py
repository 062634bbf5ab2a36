"""Where each GPU program finds its work: small index arrays, made once a layout.

A bucket of many tensors is coded by a handful of launches. Each program looks up which
tile, segment or chunk it is for.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoestring.codec.base import Layout
from shoestring.codec.dct import format as fmt
from shoestring.codec.dct.gpu.launch import INTERPRETED

PLAIN_LENGTH = 4096
# Values, padding included, that one program transforms.
VALUES_A_GROUP = 1 << 11
FEWEST_BLOCKS = 64
# More codes in a row than a thread can load at once.
MOST_ALIGNED = 16
# The walk of chunks waits for memory most of the time: rather many warps than full ones.
WARPS, FEWEST_LANES, MOST_LANES = 1024, 4, 32


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
    return torch.from_numpy(np.array(array, order="C")).to(device)


def pinned(size: int) -> Tensor:
    """Return bytes on the host that the device can write and be sent."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=not INTERPRETED)


@dataclass(frozen=True)
class Groups:
    """The programs that transform blocks of one size, one a row.

    A row is: where the values of the group begin, where the codes of its first frequency do, how
    far the next frequency's are from there, how many blocks it has, and its tensor.
    """

    rows: Tensor
    blocks: int
    align: int  # divides all places and sizes, of values
    plane: int  # and of codes
    count: int


@dataclass(frozen=True)
class Segments:
    """Runs of values that programs of `length` handle one each."""

    start: Tensor
    size: Tensor
    tensor: Tensor
    align: int
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
        scale = np.where(headers["kind"] == fmt.HALF, np.ldexp(1.0, headers["exponent"].astype(int)), 0.0)
        return scale[self.owner].astype(np.float32)


@dataclass(frozen=True)
class Places:
    """All index arrays of a bucket with given forms and chunk sizes."""

    groups: dict[int, Groups]
    plain: Segments
    floats: Floats
    uncoded: tuple[slice, ...]  # values of tensors that have no blocks
    chunk_start: Tensor
    chunk_size: Tensor
    chunks: int
    order: Tensor  # chunks by falling size: neighbours take about as long
    lanes: int  # chunks that one warp walks
    geometry: fmt.Geometry


def find_places(layout: Layout, headers: NDArray[np.void], device: torch.device) -> Places:
    return _find(layout, headers["kind"].tobytes(), headers["chunk_log2"].tobytes(), device)


@lru_cache(maxsize=1024)  # a large model has hundreds of parts
def _find(layout: Layout, kinds: bytes, chunk_logs: bytes, device: torch.device) -> Places:
    headers = np.zeros(len(layout.sizes), fmt.TENSOR)
    headers["kind"] = np.frombuffer(kinds, np.uint8)
    headers["chunk_log2"] = np.frombuffer(chunk_logs, np.uint8)
    geometry = fmt.lay_out(layout, headers)
    tiles = geometry.tiles
    side = tiles[:, fmt.TILE_SIDE]
    blocks = np.where(side > 1, tiles[:, fmt.TILE_BLOCKS], 0)

    groups = {}
    for n in np.unique(side[(side > 1) & (blocks > 0)]).tolist():
        own = tiles[(side == n) & (blocks > 0)]
        start, count = own[:, fmt.TILE_START], own[:, fmt.TILE_BLOCKS]
        groups[n] = group_blocks(n, start, start, count, count, own[:, fmt.TILE_TENSOR], device)

    chunk_start = geometry.chunk_rows[:, fmt.CHUNK_START]
    chunk_size = geometry.chunk_rows[:, fmt.CHUNK_SIZE]
    return Places(
        groups=groups,
        plain=_plain(tiles, blocks * side * side, device),
        floats=_floats(layout, headers, device),
        uncoded=_uncoded(layout, headers),
        chunk_start=to_device(chunk_start, device),
        chunk_size=_index(chunk_size, device),
        chunks=geometry.chunks,
        order=_index(np.argsort(-chunk_size, kind="stable"), device),
        lanes=_lanes(geometry.chunks),
        geometry=geometry,
    )


def _lanes(chunks: int) -> int:
    """Return the power of two that gives about `WARPS` warps."""
    return min(max(1 << max(chunks // WARPS, 1).bit_length() - 1, FEWEST_LANES), MOST_LANES)


def _uncoded(layout: Layout, headers: NDArray[np.void]) -> tuple[slice, ...]:
    slices: list[slice] = []
    for index in np.flatnonzero(headers["kind"] < fmt.FIRST_BLOCK_KIND).tolist():
        start, end = layout.offsets[index], layout.offsets[index + 1]
        if slices and slices[-1].stop == start:
            start = slices.pop().start
        slices.append(slice(start, end))
    return tuple(slices)


def group_blocks(
    n: int,
    start: NDArray[np.int64],
    plane_start: NDArray[np.int64],
    stride: NDArray[np.int64],
    blocks: NDArray[np.int64],
    tensor: NDArray[np.int64],
    device: torch.device,
) -> Groups:
    """Cut runs of blocks into groups, one a program."""
    most = max(VALUES_A_GROUP // tile_of(n).depth, FEWEST_BLOCKS)
    owner, first, count = cut(blocks, most)
    start, plane_start = start[owner] + first * n * n, plane_start[owner] + first
    stride = stride[owner]
    rows = np.stack([start, plane_start, stride, count, tensor[owner]], axis=1)
    plane = _divisor(plane_start, stride, count)
    return Groups(to_device(rows, device), most, _divisor(start), plane, owner.size)


def _divisor(*arrays: NDArray[np.int64]) -> int:
    """Return the largest power of two up to `MOST_ALIGNED` that divides all of them."""
    return math.gcd(MOST_ALIGNED, *(int(np.gcd.reduce(array, initial=0)) for array in arrays))


def _index(array: NDArray[np.int64], device: torch.device) -> Tensor:
    return to_device(array.astype(np.int32), device)


def cut(sizes: NDArray[np.int64], length: int) -> tuple[NDArray[np.int64], ...]:
    """Cut runs into pieces of at most `length`: (which run, where in it, how long)."""
    counts = -(-sizes // length)
    owner = np.repeat(np.arange(sizes.size), counts)
    first = (np.arange(owner.size) - np.repeat(np.cumsum(counts) - counts, counts)) * length
    return owner, first, np.minimum(length, sizes[owner] - first)


def _plain(tiles: NDArray[np.int64], covered: NDArray[np.int64], device: torch.device) -> Segments:
    """Cut what no block covers: tiles without a transform, and rests."""
    owner, first, size = cut(tiles[:, fmt.TILE_SIZE] - covered, PLAIN_LENGTH)
    start = tiles[owner, fmt.TILE_START] + covered[owner] + first
    return Segments(
        start=to_device(start, device),
        size=_index(size, device),
        tensor=_index(tiles[owner, fmt.TILE_TENSOR], device),
        align=_divisor(start, size),
        length=PLAIN_LENGTH,
        count=owner.size,
    )


def _floats(layout: Layout, headers: NDArray[np.void], device: torch.device) -> Floats:
    chosen = np.flatnonzero((headers["kind"] == fmt.HALF) | (headers["kind"] == fmt.FULL))
    sizes = np.array(layout.sizes, np.int64)[chosen]
    width = np.where(headers["kind"][chosen] == fmt.HALF, 1, 2)
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
