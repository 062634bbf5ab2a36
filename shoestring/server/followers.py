"""Programs that read a run's parameters and take no part in it.

A follower asks for rounds; each part is sent to it when it has come to that round, before the next update
changes it. Nothing waits for a follower: it is no member, has no lease, and what it did not ask for in
time has passed. So all that is kept of one is which parts of at most `ASKS` rounds it still waits for.
Of a part that is sent whole there is one copy, however many ask; a compressed answer is the workers' own.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from shoestring.errors import JoinError, WireError
from shoestring.model.table import Table
from shoestring.server.rounds import PartRounds
from shoestring.wire import messages as say
from shoestring.wire.messages import Message

LIMIT = 64  # followers of one model on one shard
ASKS = 2  # rounds that a follower may wait for
SILENT_S = 60.0  # after which a follower's place may go to another

_EMPTY = memoryview(b"")
Send = Callable[[bytes, Message, memoryview], None]


class Source(Protocol):
    """What followers are shown of a shard."""

    index: int
    shards: int
    run: str
    table: Table | None
    parts: dict[int, PartRounds]
    is_filled: set[int]


@dataclass
class _Ask:
    fetch: say.Fetch
    parts: set[int]  # that have not come to the round yet


@dataclass
class _Follower:
    heard_at: float
    waits: say.Follow | None = None  # for the table
    asks: dict[int, _Ask] = field(default_factory=dict)  # by round, the last asked for last


class Followers:
    """The followers of one shard, by their connections."""

    def __init__(self, source: Source, send: Send) -> None:
        self._source = source
        self._send = send
        self.known: dict[bytes, _Follower] = {}
        self._stirred: set[int] = set()  # parts that have come to another round since they were shown

    def handle(self, identity: bytes, message: Message, now: float) -> None:
        """Do what a follower asks, or raise."""
        if isinstance(message, say.Follow):
            self._follow(identity, message, now)
            return
        follower = self.known.get(identity)
        if follower is None:
            raise JoinError(
                "this shard does not know the follower, or gave its place to another while it was silent",
                hint="call `shoestring.follow` again",
            )
        follower.heard_at = now
        match message:
            case say.Fetch():
                self._fetch(identity, follower, message)
            case say.Beat():
                self._send(identity, message, _EMPTY)
            case say.Leave():
                del self.known[identity]
                self._send(identity, say.Left(), _EMPTY)
            case _:
                raise WireError(
                    f"a follower does not say `{type(message).__name__}`: it may only pull",
                    hint="call `shoestring.init()` and `wrap` to take part in a run",
                )

    def tell(self) -> None:
        """The table is here now: answer those who wait for it."""
        for identity, follower in list(self.known.items()):
            if follower.waits is not None:
                self._welcome(identity, follower, follower.waits)

    def stir(self, indices: Iterable[int]) -> None:
        """Note that parts have come to another round."""
        self._stirred.update(indices)

    def show(self, index: int) -> None:
        """Send a part, if it has come to another round, to those who wait for it."""
        if index not in self._stirred:
            return
        self._stirred.discard(index)
        for identity, follower in self.known.items():
            for ask in list(follower.asks.values()):
                if index in ask.parts:
                    self._try(identity, follower, ask, index)

    def show_next(self) -> bool:
        """Do so with one part that nobody was shown; return whether there was one."""
        for index in self._stirred:
            self.show(index)
            return True
        return False

    def end(self) -> None:
        """Tell all that nothing more comes."""
        for identity in self.known:
            self._send(identity, say.Over(), _EMPTY)
        self.known.clear()

    def _follow(self, identity: bytes, follow: say.Follow, now: float) -> None:
        source = self._source
        if follow.protocol != say.PROTOCOL:
            raise JoinError(
                f"the follower speaks protocol {follow.protocol}, this shard {say.PROTOCOL}",
                hint="install the same version of shoestring on all hosts",
            )
        is_here = follow.run in ("", source.run)
        if not is_here or (follow.shard, follow.shards) != (source.index, source.shards):
            raise JoinError(
                f"the follower looks for shard {follow.shard} of {follow.shards} of run "
                f"`{follow.run or source.run}`; this is shard {source.index} of {source.shards} "
                f"of run `{source.run}`",
                hint="give the addresses of all shards of one run, in their order",
            )
        follower = self.known.get(identity) or self._admit(identity, now)
        follower.heard_at = now
        self._welcome(identity, follower, follow)

    def _admit(self, identity: bytes, now: float) -> _Follower:
        if len(self.known) >= LIMIT:
            oldest = min(self.known, key=lambda known: self.known[known].heard_at)
            if now - self.known[oldest].heard_at <= SILENT_S:
                raise JoinError(
                    f"{LIMIT} programs follow this run already",
                    hint="close some of them, or let one follow and pass on what it reads",
                )
            del self.known[oldest]
        self.known[identity] = _Follower(now)
        return self.known[identity]

    def _welcome(self, identity: bytes, follower: _Follower, follow: say.Follow) -> None:
        """Say how far the run is, and what its model is, once a worker has told."""
        source = self._source
        follower.waits = follow if source.table is None else None
        if source.table is None:
            self._send(identity, say.Followed(source.run, -1), _EMPTY)
            return
        if source.table.rule.kind == "mean":
            del self.known[identity]
            hint = "follow a run of `wrap(model, optimizer)` whose optimizer the shards have a rule for"
            text = "this run's workers update the parameters: its shards have none to read"
            self._send(identity, say.Refusal(text, hint), _EMPTY)
            return
        packed = b"" if follow.knows else msgspec.msgpack.encode(source.table)
        self._send(identity, say.Followed(source.run, self._begun()), memoryview(packed))

    def _begun(self) -> int:
        return max((rounds.begun for rounds in self._source.parts.values()), default=0)

    def _fetch(self, identity: bytes, follower: _Follower, fetch: say.Fetch) -> None:
        follower.asks.pop(fetch.round, None)
        follower.asks[fetch.round] = ask = _Ask(fetch, set(self._source.parts))
        while len(follower.asks) > ASKS:  # what was asked first is not wanted any more
            del follower.asks[next(iter(follower.asks))]
        self._answer(identity, follower, ask)

    def _answer(self, identity: bytes, follower: _Follower, ask: _Ask) -> None:
        """Send what can be sent now of a round that was just asked for."""
        if ask.fetch.round not in follower.asks:
            return
        parts = self._source.parts
        # First whether all of it can be had: parts that are sent before a refusal are sent in vain.
        if any(self._has_passed(parts[index], ask.fetch) for index in ask.parts):
            self._pass(identity, follower, ask)
            return
        for index in sorted(ask.parts):
            self._try(identity, follower, ask, index)

    def _has_passed(self, rounds: PartRounds, fetch: say.Fetch) -> bool:
        is_gone = rounds.round > fetch.round or (rounds.round == fetch.round and rounds.is_updating)
        return fetch.whole and (is_gone or not rounds.is_whole)

    def _pass(self, identity: bytes, follower: _Follower, ask: _Ask) -> None:
        del follower.asks[ask.fetch.round]
        is_whole = all(rounds.is_whole for rounds in self._source.parts.values())
        self._send(identity, say.Passed(ask.fetch.round, self._begun(), is_whole), _EMPTY)

    def _try(self, identity: bytes, follower: _Follower, ask: _Ask, index: int) -> None:
        """Send a part if it is time."""
        fetch, rounds = ask.fetch, self._source.parts[index]
        if index not in self._source.is_filled:
            return
        if self._has_passed(rounds, fetch):
            self._pass(identity, follower, ask)
            return
        if rounds.round >= fetch.round and self._say(identity, rounds, index, fetch):
            ask.parts.discard(index)
        if not ask.parts:
            follower.asks.pop(fetch.round, None)

    def _say(self, identity: bytes, rounds: PartRounds, index: int, fetch: say.Fetch) -> bool:
        delta = rounds.delta() if fetch.whole and fetch.follows else None
        if delta is not None:
            message = say.Delta(
                part=index, version=delta.version, seq=fetch.round, codec=delta.codec, last=True
            )
            self._send(identity, message, delta.payload.data)
            return True
        full = rounds.full()
        if full is None:
            return False
        # A slot of shared memory is written again as soon as the workers have read it.
        payload = full.payload if full.slot < 0 else full.payload.copy()
        self._send(identity, say.Full(part=index, version=full.version, seq=fetch.round), payload.data)
        return True
