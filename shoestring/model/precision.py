"""What workers keep parameters in: float32, or two bytes each, of which the shards have a float32 master.

Two bytes are the master rounded: to nearest, ties to even; small numbers become denormal, what is too
large becomes infinity. That is what torch does on every device, so both sides get the same bits.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoestring.codec.base import Payload, Vector
from shoestring.errors import StreamError
from shoestring.model.parts import Part

DTYPES = ("float32", "bfloat16", "float16", "float64")  # of parameters, as torch names them
NARROW = ("bfloat16", "float16")
_CHUNK = 1 << 14  # values that are rounded while they lie in the cache


class Run(NamedTuple):
    """Neighbouring values of one part that are of one dtype."""

    start: int
    stop: int
    dtype: str

    @property
    def is_narrow(self) -> bool:
        return self.dtype in NARROW

    @property
    def size_bytes(self) -> int:
        """What the values take in an answer, where float64 has no more than float32."""
        return (self.stop - self.start) * (2 if self.is_narrow else 4)


class Precision:
    """How workers keep the values of one part."""

    def __init__(self, part: Part, dtypes: Sequence[str] = ()) -> None:
        """`dtypes` are those of the pieces; none: all are float32."""
        runs: list[Run] = []
        for piece, start in enumerate(part.layout.offsets[:-1]):
            dtype = dtypes[piece] if dtypes else DTYPES[0]
            if runs and runs[-1].dtype == dtype:
                start = runs.pop().start
            runs.append(Run(start, part.layout.offsets[piece + 1], dtype))
        self.runs = tuple(runs)
        self.size = part.size
        self.is_narrow = any(run.is_narrow for run in runs)

    def round(self, values: Vector) -> None:
        """Change values to what workers keep of them."""
        for start, stop, dtype in self.runs:
            if dtype in NARROW:
                round_to(values[start:stop], dtype)

    def pack(self, values: Vector) -> Payload:
        """Write values as workers keep them: a narrow one in two bytes, any other in four, little-endian."""
        packed = np.empty(sum(run.size_bytes for run in self.runs), np.uint8)
        at = 0
        for run in self.runs:
            own, room = values[run.start : run.stop], packed[at : at + run.size_bytes]
            room.view("<u2" if run.is_narrow else "<f4")[:] = (
                to_bits(own, run.dtype) if run.is_narrow else own
            )
            at += run.size_bytes
        return packed

    def unpack(self, payload: memoryview) -> Vector:
        """Read what `pack` has written, or all values in four bytes each."""
        if payload.nbytes == 4 * self.size:
            return np.frombuffer(payload, "<f4")
        expected = sum(run.size_bytes for run in self.runs)
        if payload.nbytes != expected:
            raise StreamError(
                f"{payload.nbytes} bytes of a part that has {expected}, or {4 * self.size} in float32",
                hint="check both sides' versions",
            )
        values: Vector = np.empty(self.size, np.float32)
        at = 0
        for run in self.runs:
            own, count = values[run.start : run.stop], run.stop - run.start
            if run.is_narrow:
                own[:] = from_bits(np.frombuffer(payload, "<u2", count, at), run.dtype)
            else:
                own[:] = np.frombuffer(payload, "<f4", count, at)
            at += run.size_bytes
        return values


def round_to(values: Vector, dtype: str) -> None:
    """Round values to a narrow dtype, in place."""
    for start in range(0, values.size, _CHUNK):
        own = values[start : start + _CHUNK]
        own[:] = from_bits(_round(own, dtype), dtype)


def to_bits(values: Vector, dtype: str) -> NDArray[np.uint16]:
    """Round values to a narrow dtype, and give the bits of each."""
    bits = np.empty(values.size, np.uint16)
    for start in range(0, values.size, _CHUNK):
        bits[start : start + _CHUNK] = _round(values[start : start + _CHUNK], dtype)
    return bits


def from_bits(bits: NDArray[Any], dtype: str) -> Vector:
    """The values that bits of a narrow dtype stand for."""
    if dtype == "bfloat16":
        wide = bits.astype(np.uint32)
        wide <<= np.uint32(16)
        return wide.view(np.float32)
    return bits.view(np.float16).astype(np.float32)


def _round(values: Vector, dtype: str) -> NDArray[np.uint16]:
    if dtype == "float16":
        with np.errstate(over="ignore", invalid="ignore"):
            return values.astype(np.float16).view(np.uint16)
    bits = values.view(np.uint32)
    rounded = bits >> np.uint32(16)
    rounded &= np.uint32(1)
    rounded += np.uint32(0x7FFF)
    rounded += bits
    rounded >>= np.uint32(16)
    is_nan = np.isnan(values)
    if is_nan.any():
        rounded[is_nan] = 0x7FC0
    return rounded.astype(np.uint16)
