"""Cut a model into parts and spread them over the shards.

A part is a run of pieces of tensors, about 0.5 to 4 MB (less in a small
model, so that shards still share it evenly), that travels, is coded and is
updated as one. How a model is cut depends on the model alone, never on the number of
shards or workers: so the bits of a run do not depend on them either, and a checkpoint
can be restored on another number of shards.

Parts follow the order in which the model registered its parameters: the last ones have
their gradients first and are pushed first. What is pushed last nothing hides, neither its way nor
its sum: so the first parts are small, and each is as large as all before it until it is as large
as the others. A tensor too large for a part is cut between its rows, so that
each piece still has a shape a codec can read.
"""

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec

from shoestring.codec.base import Layout
from shoestring.errors import JoinError
from shoestring.server.rules import Rule
from shoestring.server.statistics import Layer, check_layers

SMALLEST, LARGEST = 1 << 15, 1 << 20  # values a part, about
_HANDY = 1 << 17  # below this a part costs more by itself than by its values
_SHARE = 16  # a model has about this many parts, where the bounds allow; half as many where that is handy
_SLACK = 1.25
_GRAIN = 1024  # a row that is itself too large is cut at multiples of it: whole blocks of every size

TENSOR_LIMIT = 1 << 20
GROUP_LIMIT = 1 << 16
VALUE_LIMIT = 1 << 36


class Tensor(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One trainable parameter as all workers and shards must agree on it."""

    name: str
    shape: tuple[int, ...]
    group: int


class Table(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """All that a run's workers have in common."""

    tensors: tuple[Tensor, ...]
    rule: Rule
    groups: int
    clip_norm: float  # 0: none
    layers: tuple[Layer, ...] = ()  # whose statistics are shared


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

    @property
    def size(self) -> int:
        return self.layout.total


def cut(shapes: Sequence[tuple[int, ...]]) -> tuple[Part, ...]:
    """Cut tensors of these shapes into parts."""
    total = sum(math.prod(shape) for shape in shapes)
    least = max(min(_HANDY, 2 * total // _SHARE), SMALLEST)
    most = min(max(total // _SHARE, least), LARGEST)
    parts: list[Part] = []
    pending: list[Piece] = []
    held = before = 0  # values that are pending, and that are in parts
    for index, shape in enumerate(shapes):
        for piece in _split(index, tuple(shape), before + held, least, most):
            if pending and held + piece.size > _SLACK * _target(before, least, most):
                parts.append(Part(len(parts), tuple(pending)))
                pending, held, before = [], 0, before + held
            pending.append(piece)
            held += piece.size
    if pending:
        parts.append(Part(len(parts), tuple(pending)))
    return tuple(parts)


def assign(parts: Sequence[Part], shards: int) -> tuple[int, ...]:
    """Say which shard holds each part: the largest first, each to the shard with the least."""
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


def check_table(table: Table) -> None:
    """Refuse a table that promises more than a shard will hold, before anything is allocated."""
    sizes_fit = len(table.tensors) <= TENSOR_LIMIT and all(
        len(tensor.shape) <= 16 and all(0 <= side <= VALUE_LIMIT for side in tensor.shape)
        for tensor in table.tensors
    )
    if not sizes_fit or sum(math.prod(tensor.shape) for tensor in table.tensors) > VALUE_LIMIT:
        raise JoinError(
            f"the model has more than {TENSOR_LIMIT} tensors or {VALUE_LIMIT} values",
            hint="check the shapes of the parameters that are being trained",
        )
    if table.groups > GROUP_LIMIT or any(not 0 <= tensor.group < table.groups for tensor in table.tensors):
        raise JoinError(
            f"a parameter names a group that is not there, or {table.groups} groups are too many",
            hint="check both sides' versions",
        )
    if len(table.layers) > TENSOR_LIMIT or (problem := check_layers(table.layers, len(table.tensors))):
        raise JoinError(
            problem if len(table.layers) <= TENSOR_LIMIT else "the model has too many layers",
            hint="check both sides' versions",
        )
    if not 0 <= table.clip_norm < math.inf:
        raise JoinError(
            f"the norm to clip to is {table.clip_norm}", hint="give a positive `clip_norm`, or 0 for none"
        )


def first_difference(mine: Table, theirs: Table) -> str:
    """Say where two tables first differ; empty if they do not."""
    for own, other in zip(mine.tensors, theirs.tensors, strict=False):
        if own.name != other.name:
            return f"parameter `{other.name}` where others have `{own.name}`"
        if own.shape != other.shape:
            return f"parameter `{own.name}` has shape {other.shape}, others have {own.shape}"
        if own.group != other.group:
            return f"parameter `{own.name}` is in group {other.group}, others have it in {own.group}"
    if len(mine.tensors) != len(theirs.tensors):
        longer = max(mine.tensors, theirs.tensors, key=len)
        name = longer[min(len(mine.tensors), len(theirs.tensors))].name
        who = "others have" if longer is mine.tensors else "only this worker has"
        return f"{who} a parameter `{name}`"
    if mine.layers != theirs.layers:
        return f"it shares the statistics of {len(theirs.layers)} layers, others of {len(mine.layers)}"
    if mine.rule != theirs.rule:
        return f"the rule is {theirs.rule}, others have {mine.rule}"
    if (mine.groups, mine.clip_norm) != (theirs.groups, theirs.clip_norm):
        return (
            f"{theirs.groups} groups and clip_norm {theirs.clip_norm}, "
            f"others have {mine.groups} and {mine.clip_norm}"
        )
    return ""


def _target(before: int, least: int, most: int) -> int:
    """The size of the part that follows so many values: the first ones are pushed last, and small."""
    return min(max(before, least), most)


def _split(index: int, shape: tuple[int, ...], before: int, least: int, most: int) -> Iterator[Piece]:
    """Cut a tensor that follows so many values, evenly where its parts are of one size."""
    size = math.prod(shape)
    if size == 0:
        return
    if size <= _SLACK * _target(before, least, most):
        yield Piece(index, 0, size, shape)
        return
    whole_rows = size // shape[0] <= _SLACK * most
    row = size // shape[0] if whole_rows else _GRAIN
    rows = math.ceil(size / row)
    low = 0
    while low < rows:
        start = low * row
        target = _target(before + start, least, most)
        left = size - start
        count = 1 if left <= _SLACK * target else math.ceil(left / target)
        high = low + max(1, round((rows - low) / count))
        stop = min(high * row, size)
        yield Piece(index, start, stop, (high - low, *shape[1:]) if whole_rows else (stop - start,))
        low = high
