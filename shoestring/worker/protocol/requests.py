"""Questions to shards that are repeated until they are answered.

A question or its answer may be lost on any link. So every question is kept here until `answered`
strikes it off, and `due` gives those that are to be asked again, after pauses that grow.
"""

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass

from shoestring.wire.messages import Message

FIRST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 60.0
EMPTY = memoryview(b"")


@dataclass
class Request:
    """One question to one shard."""

    shard: int
    message: Message
    payload: memoryview
    asked_at: float
    pause_s: float = FIRST_PAUSE_S

    def is_due(self, now: float) -> bool:
        """Whether to ask again now; if so it is noted as asked, and the next pause is longer."""
        if now - self.asked_at <= self.pause_s:
            return False
        self.asked_at = now
        self.pause_s = min(2 * self.pause_s, LONGEST_PAUSE_S)
        return True


class Requests:
    """The questions of one worker that have no answer yet."""

    def __init__(self) -> None:
        self._open: dict[Hashable, Request] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._open

    def __iter__(self) -> Iterator[Request]:
        return iter(self._open.values())

    def add(self, key: Hashable, request: Request) -> Request:
        """Keep a question that is asked now."""
        self._open[key] = request
        return request

    def answered(self, key: Hashable) -> bool:
        """Strike a question off; say whether it was open."""
        return self._open.pop(key, None) is not None

    def due(self, now: float, may_ask: Callable[[Request], bool] = lambda request: True) -> Iterator[Request]:
        """The questions to ask again now, of those that may be asked; each is noted as asked."""
        for request in self._open.values():
            if may_ask(request) and request.is_due(now):
                yield request
