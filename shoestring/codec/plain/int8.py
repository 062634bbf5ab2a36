"""Blocks of values that share a power of two: one byte a value and one a block.

Each tensor is cut into blocks of `block` values; its last one may be shorter. A
block's scale is the smallest power of two that brings all of it within +-127
after rounding to nearest, ties to even, so nothing clips. Only where the next
power would round to infinity, in the last half step below 2**128, codes stop at
127. Scales stay normal numbers, so decoding never meets a denormal.

Body: the exponents of all blocks, one byte `e` each in 7..254 (the scale is
2**(e - 133)), then the codes of all values, one signed byte in -127..127 each.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from shoestring.codec.base import Layout, Payload, Vector
from shoestring.codec.plain.base import PlainCodec
from shoestring.errors import UsageError

MAX_BLOCK = 1 << 16
MAX_CODE = 127
LOW, HIGH = 7, 254  # exponents: the scale from 2**-126, the least normal number, to 2**121
_BIAS = 133  # of float32's exponent, 127, and the 6 bits a code has below its leading one
_ROUNDS_UP = 1 << 16  # carries into the exponent from 127.5 / 64 on, what would round to 128


@dataclass(frozen=True)
class Options:
    block: int = 64

    def __post_init__(self) -> None:
        if not 1 <= self.block <= MAX_BLOCK:
            raise UsageError(f"`block` is {self.block}", hint=f"give a block of 1 to {MAX_BLOCK} values")


class Int8(PlainCodec):
    """Blocks of 8-bit integers that share a power of two: about one byte a value."""

    name = "int8"
    code = 4
    options_type = Options
    options: Options

    def _body_bytes(self, layout: Layout) -> int:
        starts, _ = _blocks(layout, self.options.block)
        return starts.size + layout.total

    def _write(self, values: Vector, layout: Layout, body: Payload) -> None:
        starts, lengths = _blocks(layout, self.options.block)
        peaks = np.maximum.reduceat(np.abs(values), starts)  # [blocks]
        exponents = ((peaks.view(np.int32) + _ROUNDS_UP) >> 23).clip(LOW, HIGH)
        inverse = np.ldexp(np.float32(1), _BIAS - exponents)
        codes = np.rint(values * np.repeat(inverse, lengths)).clip(-MAX_CODE, MAX_CODE)
        body[: starts.size] = exponents
        body[starts.size :].view(np.int8)[:] = codes

    def _read(self, body: Payload, layout: Layout) -> Vector:
        starts, lengths = _blocks(layout, self.options.block)
        exponents = body[: starts.size]
        codes = body[starts.size :].view(np.int8)
        if ((exponents < LOW) | (exponents > HIGH)).any():
            raise self._broken(f"an exponent outside {LOW}..{HIGH}")
        if (codes < -MAX_CODE).any():
            raise self._broken(f"a code of -128, expected {-MAX_CODE}..{MAX_CODE}")
        scales = np.ldexp(np.float32(1), exponents.astype(np.int32) - _BIAS)
        values: Vector = np.repeat(scales, lengths)
        values *= codes
        return values


@lru_cache(maxsize=256)
def _blocks(layout: Layout, block: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Where each block of a bucket starts and how many values it has; none spans two tensors."""
    starts = [
        np.arange(at, at + size, block, dtype=np.intp)
        for at, size in zip(layout.offsets, layout.sizes, strict=False)
    ]
    joined = np.concatenate([np.empty(0, np.intp), *starts])
    return joined, np.diff(joined, append=layout.total)
