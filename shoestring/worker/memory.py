"""Memory that this worker shares with shards on its machine, so that floats need not cross a socket.

The worker offers a segment to every shard that it reaches without a network. A shard that opens it
answers with the name of its own; only then both are used.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from shoestring.codec.base import Vector
from shoestring.errors import WireError
from shoestring.wire.messages import Full
from shoestring.wire.shared import SLOTS, Segment


@dataclass
class _Pair:
    """The segments of one shard and this worker."""

    own: Segment  # this worker writes it
    theirs: Segment  # the shard writes it
    places: dict[int, int]  # of each part in both


class SharedMemory:
    """What is shared with each shard. Opened while joining, then used by the exchange's thread alone."""

    def __init__(self, addresses: Sequence[str], homes: Sequence[int], sizes: Sequence[int]) -> None:
        self._addresses = addresses
        self._homes = homes
        self._sizes = sizes
        self._offered: dict[int, Segment] = {}
        self._pairs: dict[int, _Pair] = {}

    def offer(self, shard: int) -> str:
        """Make a segment for a shard to read; return its name, empty where there is none."""
        if not self._addresses[shard].startswith("ipc:"):
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
        self._pairs[shard] = _Pair(own, theirs, {part: place for place, part in enumerate(parts)})
        return True

    def free(self, part: int, taken: Collection[int]) -> tuple[int, Vector] | None:
        """A slot for a push of a part besides those that are taken, and its memory."""
        pair = self._pairs.get(self._homes[part])
        if pair is not None:
            for slot in range(SLOTS):
                if slot not in taken and pair.own.reserve(slot):
                    return slot, pair.own.slot(pair.places[part], slot)
        return None

    def read(self, full: Full) -> memoryview:
        """The values of an answer that the shard has put into its segment."""
        pair = self._pairs.get(self._homes[full.part])
        if pair is None or full.slot >= SLOTS:
            raise WireError("an answer names shared memory that is not there", hint="check versions")
        return pair.theirs.slot(pair.places[full.part], full.slot).view(np.uint8).data

    def close(self) -> None:
        """Remove the segments."""
        for segment in [*self._offered.values(), *(pair.own for pair in self._pairs.values())]:
            segment.close()
        self._offered.clear()
        self._pairs.clear()

    def _parts(self, shard: int) -> list[int]:
        return [part for part, home in enumerate(self._homes) if home == shard]
