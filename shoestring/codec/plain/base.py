"""What the plain codecs share: the header, the length check, and `left_over`.

A payload is a header and a body whose length follows from the layout alone:

    byte 0    which codec      1 float32, 2 float16, 3 bfloat16, 4 int8, 5 topk
    byte 1    version of its body
    bytes 2-3 check of its options, little-endian: the low half of the CRC-32 of
              their canonical text, so 0 where all are at their defaults
    then      the body

Numbers in a body are little-endian. A subclass only writes and reads bodies.
"""

import zlib
from abc import abstractmethod
from typing import ClassVar

import numpy as np

from shoestring.codec.base import Layout, Payload, Vector, refuse_non_finite
from shoestring.codec.options import ConfiguredCodec, write_options
from shoestring.errors import StreamError

HEADER_BYTES = 4


class PlainCodec(ConfiguredCodec):
    """A codec of fixed size that rounds or drops each value by itself."""

    code: ClassVar[int]
    version: ClassVar[int] = 1

    @abstractmethod
    def _body_bytes(self, layout: Layout) -> int:
        """The length of the body of every payload of this layout."""

    @abstractmethod
    def _write(self, values: Vector, layout: Layout, body: Payload) -> None:
        """Fill `body` from finite values."""

    @abstractmethod
    def _read(self, body: Payload, layout: Layout) -> Vector:
        """Decode a body of the right length; `StreamError` where it holds what `_write` never writes."""

    def max_bytes(self, layout: Layout) -> int:
        return HEADER_BYTES + self._body_bytes(layout)

    def _header(self) -> bytes:
        check = zlib.crc32(write_options(self.options).encode()) & 0xFFFF
        return bytes((self.code, self.version)) + check.to_bytes(2, "little")

    def _encode(self, values: Vector, layout: Layout, left_over: Vector | None) -> Payload:
        refuse_non_finite(values, layout)
        payload = np.empty(self.max_bytes(layout), np.uint8)
        payload[:HEADER_BYTES] = np.frombuffer(self._header(), np.uint8)
        self._write(values, layout, payload[HEADER_BYTES:])
        if left_over is not None:
            # Exact, by Sterbenz's argument: what was decoded is a multiple of the value's last
            # place and no further from the value than 0 is, so the difference fits 24 bits too.
            np.subtract(values, self._read(payload[HEADER_BYTES:], layout), out=left_over)
        return payload

    def _decode(self, payload: Payload, layout: Layout, out: Vector, weight: float | None) -> None:
        expected = self.max_bytes(layout)
        if payload.size != expected:
            raise self._broken(f"{payload.size} bytes, expected {expected}")
        header = payload[:HEADER_BYTES].tobytes()
        if header != self._header():
            raise self._broken(f"header {header.hex()}, expected {self._header().hex()}")
        decoded = self._read(payload[HEADER_BYTES:], layout)
        if weight is None:
            out[:] = decoded
        else:
            out += np.float32(weight) * decoded

    def _broken(self, found: str) -> StreamError:
        return StreamError(
            f"a `{self.spec}` payload has {found}",
            hint="give both sides the same codec, options and layout; else the bytes were damaged",
        )
