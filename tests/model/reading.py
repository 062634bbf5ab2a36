"""A follower in a simulation: it wants the next version or the newest, by chance."""

from collections.abc import Callable
from random import Random

import numpy as np

from shoestring.client.tracker import Tracker
from shoestring.client.version import Version
from shoestring.errors import ShoestringError
from shoestring.wire.messages import Message

EMPTY = memoryview(b"")
Send = Callable[[int, Message, memoryview], None]


class Reading:
    """One follower of all shards."""

    def __init__(self, shards: int, random: Random, send: Send, now: float) -> None:
        self.tracker = Tracker(shards, "model", now)
        self.seen: list[Version] = []
        self.is_refused = False
        self._random = random
        self._send = send
        self.want(now)

    def take(self, shard: int, message: Message, payload: memoryview, now: float) -> None:
        try:
            self.tracker.handle(shard, message, payload, now)
        except ShoestringError:
            self.is_refused = True
            raise
        while (version := self.tracker.take()) is not None:
            self.seen.append(version)
            self.want(now)
        self.post()

    def want(self, now: float) -> None:
        """Ask for one more version."""
        if self._random.random() < 0.7:
            self.tracker.want_next(now)
        else:
            self.tracker.want_newest(now)
        self.post()

    def tick(self, now: float) -> None:
        self.tracker.tick(now)
        self.post()

    def post(self) -> None:
        while self.tracker.outbox:
            shard, message = self.tracker.outbox.popleft()
            self._send(shard, message, EMPTY)


def parts_of(version: Version, cut) -> list[bytes]:
    """The values of each part as a version has them."""
    flat = [values.reshape(-1) for values in version.parameters.values()]
    return [
        np.concatenate([flat[piece.tensor][piece.start : piece.stop] for piece in part.pieces]).tobytes()
        for part in cut
    ]
