"""Memory that a worker and a shard on one machine share, so that floats need not cross a socket.

A segment is a file without blocks until it is written, in the machine's memory file system.
Its name is random; whoever made it tells it to the other side over an `ipc://` connection
and removes the file once both have it open, so that nothing is left behind by a crash.

It holds two slots for each part, in the order of the parts, so that one round can be
written while the one before is still being read. Memory for a slot is reserved before it
is written: where the file system has none left, nothing is shared and sockets do it all.
"""

import mmap
import os
import re
import secrets
import stat
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float32]

FOLDER = Path("/dev/shm")
SLOTS = 2
_NAME = re.compile(r"shoestring-[0-9a-f]{32}")


class Segment:
    """One side's memory: it writes, the other reads."""

    def __init__(self, name: str, memory: mmap.mmap, sizes: Sequence[int], descriptor: int = -1) -> None:
        self.name = name
        self._values: Vector = np.frombuffer(memory, np.float32)
        self._starts: list[int] = np.concatenate([[0], np.cumsum(sizes)]).tolist()
        self._descriptor = descriptor  # of the side that writes
        self._reserved: dict[int, bool] = {}

    @classmethod
    def create(cls, sizes: Sequence[int]) -> "Segment | None":
        """Make a segment for parts of these sizes, in values; none where there is no such memory."""
        name = f"shoestring-{secrets.token_hex(16)}"
        length = _length(sizes)
        if not length:
            return None
        try:
            descriptor = os.open(FOLDER / name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError:
            return None
        try:
            os.ftruncate(descriptor, length)
            segment = cls(name, mmap.mmap(descriptor, length), sizes, descriptor)
        except OSError:
            os.close(descriptor)
            os.unlink(FOLDER / name)
            return None
        if not segment.reserve(0):
            segment.close()
            return None
        return segment

    @classmethod
    def open(cls, name: str, sizes: Sequence[int]) -> "Segment | None":
        """Open the other side's segment to read; none if it is not what it should be."""
        if _NAME.fullmatch(name) is None or not _length(sizes):
            return None
        try:
            descriptor = os.open(FOLDER / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return None
        try:
            found = os.fstat(descriptor)
            is_ours = stat.S_ISREG(found.st_mode) and found.st_uid == os.getuid()
            if not is_ours or found.st_size != _length(sizes):
                return None
            return cls(name, mmap.mmap(descriptor, found.st_size, access=mmap.ACCESS_READ), sizes)
        except OSError:
            return None
        finally:
            os.close(descriptor)

    def reserve(self, slot: int) -> bool:
        """Make sure that there is memory for a slot of every part; say whether there is."""
        if slot not in self._reserved:
            half = 4 * self._starts[-1]
            try:
                os.posix_fallocate(self._descriptor, slot * half, half)
                self._reserved[slot] = True
            except OSError:
                self._reserved[slot] = False
        return self._reserved[slot]

    def close(self) -> None:
        """Give up the name and the file; views that are in use stay."""
        self.unlink()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def slot(self, place: int, slot: int) -> Vector:
        """The memory of one slot of the part at a place in the order."""
        half = self._starts[-1]
        start, stop = self._starts[place], self._starts[place + 1]
        return self._values[slot * half + start : slot * half + stop]

    def unlink(self) -> None:
        """Remove the name; whoever has it open keeps the memory."""
        with suppress(FileNotFoundError):
            os.unlink(FOLDER / self.name)


def _length(sizes: Sequence[int]) -> int:
    return SLOTS * 4 * sum(sizes)
