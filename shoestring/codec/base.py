"""The interface of codecs: a bucket's float32 values to bytes, and back.

A bucket is a run of tensors laid end to end in one float32 vector. Both sides
know its `Layout`, so a payload carries no names and no shapes.

Every codec promises:
- `decode` is exact: one payload gives the same bits on every backend and machine;
- `encode` refuses NaN and infinity before it writes anything;
- `left_over + decoded` is, bit for bit, the vector that was coded (see `encode`);
- `decode` answers any bytes at all with values or a `StreamError`, and allocates
  nothing that the layout does not justify.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from shoestring.errors import CodecError, NonFiniteError

Vector = NDArray[np.float32]
Payload = NDArray[np.uint8]
Buffer = bytes | bytearray | memoryview | Payload

FLOAT32_MAX = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Layout:
    """The shapes of a bucket's tensors, in order."""

    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, shapes: Iterable[Iterable[int]]) -> "Layout":
        """Build a layout from any nested iterable, e.g. `p.shape for p in parameters`."""
        return cls(tuple(tuple(int(side) for side in shape) for shape in shapes))

    def __hash__(self) -> int:
        return self._hash  # looked up for every payload, in several tables

    @cached_property
    def _hash(self) -> int:
        return hash(self.shapes)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        return tuple(math.prod(shape) for shape in self.shapes)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each tensor starts, and the total as the last entry."""
        starts = [0]
        for size in self.sizes:
            starts.append(starts[-1] + size)
        return tuple(starts)

    @cached_property
    def total(self) -> int:
        return self.offsets[-1]


class Codec(ABC):
    """One way to put a bucket on the wire. Holds options, no state: safe to share."""

    name: ClassVar[str]

    @property
    @abstractmethod
    def spec(self) -> str:
        """The text that builds this codec again, e.g. `dct:block=8,step=2.0`."""

    @abstractmethod
    def max_bytes(self, layout: Layout) -> int:
        """The most bytes a payload of this layout can take."""

    @abstractmethod
    def _encode(self, values: Vector, layout: Layout, left_over: Vector | None) -> Payload:
        """Encode checked values; fill `left_over` where given."""

    @abstractmethod
    def _decode(self, payload: Payload, layout: Layout, out: Vector, weight: float | None) -> None:
        """Decode into checked `out`; `StreamError` on bytes that are not a stream."""

    def encode(self, values: Vector, layout: Layout, left_over: Vector | None = None) -> Payload:
        """Turn a bucket into bytes.

        `left_over`, where given, receives the values less the decoded payload. The sum of both is
        the vector that was coded: `values` itself for element-wise codecs; for
        those that mix elements, `values` rounded to a grid fine enough not to
        matter and coarse enough that the sum has no rounding (see `dct/README.md`).
        """
        check_vector(values, layout, "values")
        if left_over is not None:
            check_vector(left_over, layout, "left_over")
            if np.may_share_memory(left_over, values):
                raise CodecError("`left_over` overlaps `values`", hint="give `left_over` memory of its own")
        return self._encode(values, layout, left_over)

    def decode(self, payload: Buffer, layout: Layout, out: Vector, weight: float | None = None) -> None:
        """Write the decoded values into `out`, or add them times `weight` where given.

        After a `StreamError` the contents of `out` are undefined when values were
        being set, and untouched when they were being added.
        """
        check_vector(out, layout, "out")
        if not out.flags.writeable:
            raise CodecError("`out` is read-only", hint="give a writable float32 vector")
        if weight is not None and not abs(weight) <= FLOAT32_MAX:
            raise CodecError(f"weight {weight} is not a finite float32", hint="give a finite weight")
        own = np.frombuffer(payload, np.uint8)
        own.flags.writeable = False  # as it came or not: kernels are compiled for one kind of array
        self._decode(own, layout, out, weight)


def check_vector(vector: Vector, layout: Layout, name: str) -> None:
    """Raise `CodecError` unless `vector` is one contiguous float32 vector of the layout's size."""
    if vector.dtype != np.float32 or vector.ndim != 1 or not vector.flags.c_contiguous:
        raise CodecError(
            f"`{name}` is {vector.dtype} with shape {vector.shape}, expected one contiguous float32 vector",
            hint="flatten it and convert it to float32 first",
        )
    if vector.size != layout.total:
        raise CodecError(
            f"`{name}` has {vector.size} values, but the layout has {layout.total}",
            hint="pass the layout the bucket was built with",
        )


def refuse_non_finite(values: Vector, layout: Layout) -> None:
    """Raise `NonFiniteError` naming the first tensor that holds NaN or infinity."""
    if np.isfinite(values).all():
        return
    for index, (start, size) in enumerate(zip(layout.offsets, layout.sizes, strict=False)):
        if not np.isfinite(values[start : start + size]).all():
            raise NonFiniteError(
                f"tensor {index} (shape {layout.shapes[index]}) holds NaN or infinity",
                hint="skip this step, lower the learning rate, or clip the gradient",
            )
