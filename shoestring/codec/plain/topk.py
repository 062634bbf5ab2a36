"""The largest values of each tensor, exact; the others are left over.

Of a tensor with n > 0 values the `max(1, round(ratio * n))` largest by magnitude
are sent; among equals the lower index wins, so a payload is a function of the
values alone.

Body, for each tensor in turn: the indices, strictly increasing, each in the
fewest whole bytes that hold n - 1; then the values at them as float32.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shoestring.codec.base import Layout, Payload, Vector
from shoestring.codec.plain.base import PlainCodec
from shoestring.errors import UsageError

_VALUE_BYTES = 4


@dataclass(frozen=True)
class Options:
    ratio: float = 0.01

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise UsageError(f"`ratio` is {self.ratio}", hint="give a part of the values above 0 and up to 1")


@dataclass(frozen=True)
class _Part:
    """One tensor: which values of the bucket it is, and which bytes of the body it gets."""

    values: slice
    indices: slice
    chosen: slice
    width: int

    @property
    def size(self) -> int:
        return int(self.values.stop - self.values.start)

    @property
    def count(self) -> int:
        return int(self.chosen.stop - self.chosen.start) // _VALUE_BYTES


class TopK(PlainCodec):
    """The largest part of each tensor's values, and nothing of the rest."""

    name = "topk"
    code = 5
    options_type = Options
    options: Options

    def _body_bytes(self, layout: Layout) -> int:
        return sum(self._count(size) * (_width(size) + _VALUE_BYTES) for size in layout.sizes)

    def _write(self, values: Vector, layout: Layout, body: Payload) -> None:
        for part in self._parts(layout):
            tensor = values[part.values]
            indices = _largest(tensor, part.count)
            wide = indices.astype("<u8").view(np.uint8).reshape(part.count, 8)
            body[part.indices] = wide[:, : part.width].ravel()
            body[part.chosen].view("<f4")[:] = tensor[indices]

    def _read(self, body: Payload, layout: Layout) -> Vector:
        out = np.zeros(layout.total, np.float32)
        for part in self._parts(layout):
            wide = np.zeros((part.count, 8), np.uint8)
            wide[:, : part.width] = body[part.indices].reshape(part.count, part.width)
            indices = wide.view("<u8").ravel().astype(np.uint64)
            if indices[-1] >= part.size or (indices[1:] <= indices[:-1]).any():
                raise self._broken(f"indices that do not increase, or reach beyond {part.size - 1}")
            chosen = body[part.chosen].view("<f4")
            if not np.isfinite(chosen).all():
                raise self._broken("NaN or infinity")
            out[part.values][indices] = chosen
        return out

    def _count(self, size: int) -> int:
        return max(1, round(self.options.ratio * size)) if size else 0

    def _parts(self, layout: Layout) -> Iterator[_Part]:
        """Go through the tensors that have values."""
        at = 0
        for start, size in zip(layout.offsets, layout.sizes, strict=False):
            if size:
                count, width = self._count(size), _width(size)
                middle = at + count * width
                end = middle + count * _VALUE_BYTES
                yield _Part(slice(start, start + size), slice(at, middle), slice(middle, end), width)
                at = end


def _width(size: int) -> int:
    """How many bytes hold every index of a tensor."""
    return max(1, ((size - 1).bit_length() + 7) // 8)


def _largest(tensor: Vector, count: int) -> NDArray[np.intp]:
    """The indices of the `count` largest magnitudes, in increasing order; ties go to lower indices."""
    magnitudes = tensor.view(np.uint32) & 0x7FFFFFFF  # finite floats are ordered as their bits are
    least = np.partition(magnitudes, tensor.size - count)[tensor.size - count]
    above = np.flatnonzero(magnitudes > least)
    equal = np.flatnonzero(magnitudes == least)[: count - above.size]
    return np.sort(np.concatenate((above, equal)))
