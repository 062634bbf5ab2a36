"""Messages as frames, and the one decoder.

Every message is exactly two frames: a header (CRC-32C of the rest of the header and of
the payload, then the message in MessagePack) and a payload, possibly empty, which is
never copied. `decode` answers anything else with `WireError` and keeps nothing.
"""

import struct
from collections.abc import Sequence

import google_crc32c
import msgspec
import numpy as np

from shoestring.errors import WireError
from shoestring.wire import messages

FRAMES = 2
HEADER_LIMIT = 1 << 20
PAYLOAD_LIMIT = 64 << 20

Buffer = bytes | memoryview

_CRC = struct.Struct("<I")
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[messages.Any] = msgspec.msgpack.Decoder(messages.Any)


def encode(message: messages.Message, payload: Buffer = b"") -> tuple[bytes, Buffer]:
    """Return the two frames of a message. `payload` is not copied."""
    body = _encoder.encode(message)
    return _CRC.pack(_checksum(body, payload)) + body, payload


def decode(frames: Sequence[Buffer]) -> tuple[messages.Message, memoryview]:
    """Return the message and its payload, or raise `WireError`."""
    if len(frames) != FRAMES:
        raise _bad(f"a message of {len(frames)} frames, expected {FRAMES}")
    header, payload = memoryview(frames[0]), memoryview(frames[1])
    if not _CRC.size < header.nbytes <= HEADER_LIMIT or payload.nbytes > PAYLOAD_LIMIT:
        raise _bad(f"frames of {header.nbytes} and {payload.nbytes} bytes are out of bounds")
    body = header[_CRC.size :]
    if _CRC.unpack_from(header)[0] != _checksum(body, payload):
        raise _bad("the checksum does not match")
    try:
        return _decoder.decode(body), payload
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _bad(f"the header cannot be read: {error}") from None


def _checksum(body: Buffer, payload: Buffer) -> int:
    # The library refuses a memoryview, but takes an array over the same memory.
    crc: int = google_crc32c.value(bytes(body))
    return google_crc32c.extend(crc, np.frombuffer(payload, np.uint8)) if len(payload) else crc


def _bad(what: str) -> WireError:
    return WireError(
        f"bad message: {what}",
        hint="check that both sides run the same version, and what else uses this port",
    )
