"""Memory that this worker shares with shards on its machine, so that floats need not cross a socket.

The worker offers a segment to every shard that it reaches without a network. A shard that opens it
answers with the name of its own; only then both are used.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from shoestring.codec.base import Vector
from shoestring.errors import WireError
from shoestring.wire.shared import SLOTS, Segment


@dataclass
class SharedPart:
    """Where a part lies in the segments of this worker and of the part's shard."""

    own: Segment  # this worker writes it
    theirs: Segment  # the shard writes it
    place: int  # in the order of both

    def free(self, taken: Collection[int]) -> tuple[int, Vector] | None:
        """A slot that is not taken, and its memory, for a push."""
        for slot in range(SLOTS):
            if slot not in taken and self.own.reserve(slot):
                return slot, self.own.slot(self.place, slot)
        return None

    def read(self, slot: int) -> memoryview:
        """The values that the shard has put into a slot."""
        if slot >= SLOTS:
            raise WireError("an answer names shared memory that is not there", hint="check versions")
        return self.theirs.slot(self.place, slot).view(np.uint8).data


class SharedMemory:
    """What is shared with each shard. Opened while joining, then used by the exchange's thread alone."""

    def __init__(self, addresses: Sequence[str], homes: Sequence[int], sizes: Sequence[int]) -> None:
        self._addresses = addresses
        self._homes = homes
        self._sizes = sizes
        self._offered: dict[int, Segment] = {}
        self.parts: dict[int, SharedPart] = {}  # those that are shared

    def offer(self, shard: int) -> str:
        """Make a segment for a shard to read; return its name, empty where there is none."""
        if shard not in self._homes or not self._addresses[shard].startswith("ipc:"):
            return ""
        segment = Segment.create([self._sizes[part] for part in self._parts(shard)])
        if segment is None:
            return ""
        self._offered[shard] = segment
        return segment.name

    def accept(self, shard: int, name: str) -> bool:
        """Open the shard's segment, if it has opened this worker's; nobody else will open that."""
        own = self._offered.pop(shard, None)
        if own is None:
            return False
        own.unlink()
        parts = self._parts(shard)
        theirs = Segment.open(name, [self._sizes[part] for part in parts])
        if theirs is None:
            own.close()
            return False
        self.parts |= {part: SharedPart(own, theirs, place) for place, part in enumerate(parts)}
        return True

    def close(self) -> None:
        """Remove the segments."""
        for segment in [*self._offered.values(), *(part.own for part in self.parts.values())]:
            segment.close()
        self._offered.clear()
        self.parts.clear()

    def _parts(self, shard: int) -> list[int]:
        return [part for part, home in enumerate(self._homes) if home == shard]
