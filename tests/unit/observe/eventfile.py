"""Read the files that TensorBoard reads, as it does: records with a length and two checksums."""

import struct
from pathlib import Path

import google_crc32c
from tensorboardX.proto.event_pb2 import Event


def read_scalars(path: Path) -> list[tuple[str, int, float]]:
    """Names, steps and values, in the file's order."""
    content, found = path.read_bytes(), []
    while content:
        (size,) = struct.unpack("<Q", content[:8])
        _check(content[:8], content[8:12])
        data = content[12 : 12 + size]
        _check(data, content[12 + size : 16 + size])
        event = Event.FromString(data)
        found += [(value.tag, event.step, value.simple_value) for value in event.summary.value]
        content = content[16 + size :]
    return found


def _check(data: bytes, checksum: bytes) -> None:
    crc = google_crc32c.value(data)
    masked = ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
    assert struct.pack("<I", masked) == checksum
