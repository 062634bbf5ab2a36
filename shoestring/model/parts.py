"""Cut a model into parts and spread them over the shards.

A part is a run of pieces of tensors that travels, is coded and is updated as one. How a model is
cut depends on the model alone, never on the number of shards or workers: so the bits of a run do not
depend on them either, and a checkpoint can be restored on another number of shards.

Parts follow the order in which the model registered its parameters: the last ones have their
gradients first and are pushed first. What is pushed last nothing hides, neither its way nor its sum:
so the first parts of a large model are small, and sizes grow up to 4 MB. So small ones are left to
even out what large ones leave uneven: on up to 16 shards the largest holds at most 1.05 of the mean
of any model of 10 MB or more. A smaller one has some ten parts, as small ones cost more by themselves
than by their values. A tensor too large for a part is cut between its rows where these are small
enough, so that each piece still has a shape a codec can read.
"""

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from shoestring.codec.base import Layout
from shoestring.model.layers import Layer

EVEN_FROM = 2_500_000  # values of a model that up to 16 shards are to share evenly: 10 MB
SMALLEST, LARGEST = 1 << 15, 1 << 20  # values a part, about; a large model's first parts are smaller
_HANDY = 1 << 17  # below this a part costs more by itself than by its values: only for evenness' sake
_SHARE = 8  # a small model has about this many parts, where the bounds allow
_SLACK = 1.25  # of a small model's parts
# Parts are dealt the largest first. One of size s is dealt to a shard that holds at most a mean share of
# what was dealt before. So no shard of m holds more than 1.05 of the mean if for every part
# (m - 1) s <= 0.05 of all + what is smaller: for 16 shards, sizes that grow by a 15th of what precedes
# them. An 18th, and a tenth more where a tensor is not cut for it, leaves room for whole rows.
_EVENNESS, _PACE, _EVEN_SLACK = 20, 18, 1.1
_GRAIN = 1024  # a row that is itself too large is cut at multiples of it: whole blocks of every size


@dataclass(frozen=True)
class Piece:
    """Values `start` to `stop` of one tensor, and their shape."""

    tensor: int
    start: int
    stop: int
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Part:
    """What travels as one."""

    index: int
    pieces: tuple[Piece, ...]

    @cached_property
    def layout(self) -> Layout:
        return Layout(tuple(piece.shape for piece in self.pieces))

    @cached_property
    def size(self) -> int:
        return self.layout.total


def cut(shapes: Sequence[tuple[int, ...]]) -> tuple[Part, ...]:
    """Cut tensors of these shapes into parts."""
    total = sum(math.prod(shape) for shape in shapes)
    parts: list[Part] = []
    pending: list[Piece] = []
    held = before = 0  # values that are pending, and that are in parts
    for index, shape in enumerate(shapes):
        for piece in _split(index, tuple(shape), before + held, total):
            if pending and held + piece.size > _limit(before, total):
                parts.append(Part(len(parts), tuple(pending)))
                pending, held, before = [], 0, before + held
            pending.append(piece)
            held += piece.size
    if pending:
        parts.append(Part(len(parts), tuple(pending)))
    return tuple(parts)


def assign(parts: Sequence[Part], shards: int) -> tuple[int, ...]:
    """Say which shard holds each part: the largest first, each to the shard with the least.

    Where there are fewer parts than shards, the first shards hold one each.
    """
    loads = [(0, shard) for shard in range(shards)]  # a heap
    homes = [0] * len(parts)
    for part in sorted(parts, key=lambda part: (-part.size, part.index)):
        load, home = loads[0]
        homes[part.index] = home
        heapq.heapreplace(loads, (load + part.size, home))
    return tuple(homes)


def layers_of(part: Part, layers: Sequence[Layer]) -> tuple[Layer, ...]:
    """The layers whose statistics travel with a part: that with the start of their parameter."""
    starts = {piece.tensor for piece in part.pieces if piece.start == 0}
    return tuple(layer for layer in layers if layer.tensor in starts)


def pack_used(used: NDArray[np.bool_]) -> bytes:
    """Write which pieces have a gradient; nothing where all have."""
    return b"" if used.all() else np.packbits(used).tobytes()


def unpack_used(packed: bytes, pieces: int) -> NDArray[np.bool_]:
    if not packed:
        return np.ones(pieces, bool)
    return np.unpackbits(np.frombuffer(packed, np.uint8), count=pieces).astype(bool)


def pack_flags(flags: NDArray[np.bool_]) -> bytes:
    """Write one bit for each part; nothing where none is set."""
    return np.packbits(flags).tobytes() if flags.any() else b""


def is_flagged(packed: bytes, index: int) -> bool:
    """Whether the bit of a part is set."""
    return index // 8 < len(packed) and bool(packed[index // 8] >> (7 - index % 8) & 1)


def _target(before: int, total: int) -> int:
    """The size of the part that follows so many of a model's values: the first ones are small."""
    if total < EVEN_FROM:
        return max(min(_HANDY, total // _SHARE), SMALLEST)
    return min(max(before, _HANDY), (total // _EVENNESS + before) // _PACE, total // _EVENNESS, LARGEST)


def _limit(before: int, total: int) -> float:
    """The most that such a part holds, for the sake of tensors that are not cut."""
    return _target(before, total) * (_SLACK if total < EVEN_FROM else _EVEN_SLACK)


def _split(index: int, shape: tuple[int, ...], before: int, total: int) -> Iterator[Piece]:
    """Cut a tensor that follows so many values, evenly where its parts are of one size."""
    size = math.prod(shape)
    if size == 0:
        return
    first = _limit(before, total)
    if size <= first:
        yield Piece(index, 0, size, shape)
        return
    whole_rows = size // shape[0] <= first
    row = size // shape[0] if whole_rows else _GRAIN
    rows = math.ceil(size / row)
    low = 0
    while low < rows:
        start = low * row
        left = size - start
        is_last = left <= _limit(before + start, total)
        count = 1 if is_last else math.ceil(left / _target(before + start, total))
        high = low + max(1, round((rows - low) / count))
        stop = min(high * row, size)
        yield Piece(index, start, stop, (high - low, *shape[1:]) if whole_rows else (stop - start,))
        low = high
