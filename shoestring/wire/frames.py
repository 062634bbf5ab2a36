"""Messages as frames, and the one decoder.

Every message is exactly two frames: a header (CRC-32C of the rest of the header and of
the payload, then the message in MessagePack) and a payload, possibly empty, which is
never copied. `decode` answers anything else with `WireError` and keeps nothing; where the bytes
are not those that were sent, with `DamagedError`: a repetition may be whole.
"""

import struct
from collections.abc import Sequence
from typing import Any

import google_crc32c
import msgspec
import numpy as np

from shoestring.errors import DamagedError, WireError
from shoestring.wire import messages

FRAMES = 2
HEADER_LIMIT = 1 << 20
PAYLOAD_LIMIT = 64 << 20

Buffer = bytes | memoryview

_HELLO = 1  # its tag
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
        raise _damaged(f"a message of {len(frames)} frames, expected {FRAMES}")
    header, payload = memoryview(frames[0]), memoryview(frames[1])
    if not _CRC.size < header.nbytes <= HEADER_LIMIT or payload.nbytes > PAYLOAD_LIMIT:
        raise _damaged(f"frames of {header.nbytes} and {payload.nbytes} bytes are out of bounds")
    body = header[_CRC.size :]
    if _CRC.unpack_from(header)[0] != _checksum(body, payload):
        raise _damaged("the checksum does not match")
    try:
        return _decoder.decode(body), payload
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(
            _other_version(body) or f"bad message: the header cannot be read: {error}",
            hint="install the same version of shoestring on all hosts",
        ) from None


def _other_version(body: Buffer) -> str:
    """Say so if a header that cannot be read is the `Hello` of another version of the protocol."""
    try:
        tag, protocol, *_ = msgspec.msgpack.decode(body, type=list[Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError):
        return ""
    if tag != _HELLO or not isinstance(protocol, int) or protocol == messages.PROTOCOL:
        return ""
    return f"the worker speaks protocol {protocol}, this shard {messages.PROTOCOL}"


def _checksum(body: Buffer, payload: Buffer) -> int:
    # The library refuses a memoryview, but takes an array over the same memory.
    crc: int = google_crc32c.value(bytes(body))
    return google_crc32c.extend(crc, np.frombuffer(payload, np.uint8)) if len(payload) else crc


def _damaged(what: str) -> DamagedError:
    return DamagedError(
        f"bad message: {what}",
        hint="check what else uses this port, and the network between",
    )
