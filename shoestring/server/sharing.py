"""Memory that a shard shares with the workers on its machine, so that floats need not cross a socket."""

from collections.abc import Mapping

import numpy as np

from shoestring.errors import WireError
from shoestring.server.members import Member
from shoestring.server.rounds import PartRounds
from shoestring.wire.messages import Push
from shoestring.wire.shared import SLOTS, Segment


class SharedMemory:
    """The segment of one shard, which all workers on its machine read, and theirs, which it reads."""

    def __init__(self) -> None:
        self._segment: Segment | None = None

    def open(self, member: Member, name: str, parts: Mapping[int, PartRounds]) -> str:
        """Open a worker's memory; return the name of this shard's, to be read by workers like it."""
        in_order = [parts[index] for index in sorted(parts)]
        sizes = [rounds.holding.part.size for rounds in in_order]
        if member.segment is None or member.segment.name != name:  # a repeated hello finds it unlinked
            member.segment = Segment.open(name, sizes)
        if self._segment is None and member.segment is not None:
            self._segment = Segment.create(sizes)
            if self._segment is not None:
                # One slot: a reply that finds it taken, as with a delay, goes through the socket.
                for place, rounds in enumerate(in_order):
                    rounds.holding.slots = (self._segment.slot(place, 0),)
        return self._segment.name if self._segment is not None and member.segment is not None else ""

    def values(self, member: Member, push: Push, parts: Mapping[int, PartRounds]) -> memoryview:
        """What a worker has put into the slot that its push names."""
        if member.segment is None or push.slot >= SLOTS or push.skip:
            raise WireError("a push names shared memory that is not there", hint="start the worker again")
        place = sorted(parts).index(push.part)
        return member.segment.slot(place, push.slot).view(np.uint8).data

    def close(self) -> None:
        """Let go of the memory."""
        if self._segment is not None:
            self._segment.close()
