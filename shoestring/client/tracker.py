"""One follower's side of the protocol: what it asks of all shards, and versions that are whole.

No sockets, no clock, no threads: `handle` takes a message and the time and leaves messages in `outbox`.
A version is put together once all parts of one round have come, so what is given is never of two rounds.
A round that a shard has passed is given up for a later one; each time that happens in a row more room is
left, as rounds may go by faster than messages.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from shoestring.client.version import Version
from shoestring.codec.base import Vector
from shoestring.codec.registry import codec_of
from shoestring.errors import JoinError, WireError
from shoestring.model.parts import Part, assign
from shoestring.model.precision import Precision
from shoestring.model.table import Table, check_table, parts_of, precision_of, read_table
from shoestring.wire import messages as say
from shoestring.wire.messages import Message
from shoestring.worker.protocol.requests import EMPTY, Request, Requests

AHEAD = 2  # rounds that are asked for at once, when every round is wanted
_LONGEST_STRIDE = 10  # doublings of the room that is left for a round to be asked in time

Answer = tuple[say.Full | say.Delta, memoryview]


@dataclass
class _Gathering:
    """A round whose parts are coming in."""

    round: int
    whole: bool
    parts: dict[int, Answer] = field(default_factory=dict)


class _State:
    """All parts as they were at the last version, to which differences are added."""

    def __init__(self, table: Table, shards: int) -> None:
        check_table(table)
        self.table = table
        self.parts: Sequence[Part] = parts_of(table)
        self.homes = assign(self.parts, shards)
        self._precisions: list[Precision] = [precision_of(part, table.tensors) for part in self.parts]
        self._values: dict[int, Vector] = {}
        self._versions: dict[int, int] = {}

    def fits(self, index: int, message: say.Full | say.Delta) -> bool:
        """Whether an answer leads to a whole part from what is here."""
        is_full = isinstance(message, say.Full)
        return is_full or self._versions.get(index) in (message.version - 1, message.version)

    def take(self, index: int, message: say.Full | say.Delta, payload: memoryview) -> None:
        """Go on to what an answer brings."""
        part, precision = self.parts[index], self._precisions[index]
        if isinstance(message, say.Full):
            self._values[index] = np.array(precision.unpack(payload))
        elif message.codec and message.version != self._versions[index]:
            octets = np.frombuffer(payload, np.uint8)
            codec_of(message.codec).decode(octets, part.layout, self._values[index], 1.0)
        self._versions[index] = message.version
        if precision.is_narrow and self.table.rule.moves_parameters:
            precision.round(self._values[index])

    def version(self, seq: int, whole: bool) -> Version:
        """Copy all parameters, as the workers' models hold them."""
        tensors = self.table.tensors
        arrays = [np.empty(int(np.prod(tensor.shape)), np.float32) for tensor in tensors]
        for part, precision in zip(self.parts, self._precisions, strict=True):
            values = self._values[part.index]
            if precision.is_narrow:
                values = values.copy()
                precision.round(values)
            offsets = part.layout.offsets
            for piece, start, stop in zip(part.pieces, offsets, offsets[1:], strict=False):
                arrays[piece.tensor][piece.start : piece.stop] = values[start:stop]
        named = zip(tensors, arrays, strict=True)
        parameters = {tensor.name: array.reshape(tensor.shape) for tensor, array in named}
        return Version(seq, whole, parameters, {tensor.name: tensor.dtype for tensor in tensors})


class Tracker:
    """What is asked of each shard, what is waited for, and the versions that came of it."""

    def __init__(self, shards: int, run: str, now: float) -> None:
        self.outbox: deque[tuple[int, Message]] = deque()
        self.ready: deque[Version] = deque()
        self.last = -1  # the round of the newest version
        self.given = -1  # the round of the last one that was taken
        self.run = run
        self._shards = shards
        self._state: _State | None = None
        self._requests = Requests()
        self._gatherings: dict[int, _Gathering] = {}
        self._met: set[int] = set()  # shards that know of this follower
        self._begun: dict[int, int] = {}  # the last round of each shard that has answered a look
        self._is_whole = True  # whether rounds are
        self._spare: Version | None = None  # given where a look finds no newer one
        self._is_wanted = False  # whether any version is, yet
        self._wants_every = False  # whether the round after the one that is waited for is wanted, too
        self._misses = 0  # rounds in a row that were asked for too late
        self._over: set[int] = set()
        self._echoed_at = [float("-inf")] * shards
        self._ask_all(now)

    @property
    def is_over(self) -> bool:
        """Whether a shard has ended: no further round will be whole."""
        return bool(self._over)

    @property
    def table(self) -> Table | None:
        """What the model is, once the shards have told."""
        return None if self._state is None else self._state.table

    def missing(self) -> list[int]:
        """The shards whose answers are waited for."""
        return sorted({request.shard for request in self._requests} - self._over)

    def wanted(self) -> int | None:
        """The round that is waited for; none while the shards are asked how far they are."""
        return min(self._gatherings, default=None)

    def want_newest(self, now: float) -> None:
        """Get the newest version that is newer than the last one taken, whichever round that is."""
        if self.ready:
            self._spare = self.ready.pop()
            self.ready.clear()
        self._misses = 0
        self._is_wanted, self._wants_every = True, False
        self._look(now)

    def want_next(self, now: float) -> None:
        """Get the versions of the next rounds, `AHEAD` more than were taken."""
        self._is_wanted = self._wants_every = True
        if self._is_looking:
            return
        if self.last < 0:
            self._look(now)
            return
        if self._gatherings and min(self._gatherings) > self.last + 1:
            return  # rounds were missed: a later one is asked for already
        self._misses = 0
        ahead = AHEAD if self._is_whole else 1
        for seq in range(self.last + 1, self.given + 1 + ahead):
            if seq not in self._gatherings:
                self._fetch(seq, now, follows=True)

    def take(self) -> Version | None:
        """The next version, if it is here."""
        if not self.ready:
            return None
        version = self.ready.popleft()
        self.given = version.round
        return version

    def handle(self, shard: int, message: Message, payload: memoryview, now: float) -> None:
        """Take one message of a shard."""
        match message:
            case say.Followed():
                self._followed(shard, message, payload, now)
            case say.Full() | say.Delta():
                self._take(shard, message, payload, now)
            case say.Passed():
                self._passed(message, now)
            case say.Beat():
                self._echoed_at[shard] = max(self._echoed_at[shard], message.at)
            case say.Over():
                self._over.add(shard)
                self._give_spare()
            case say.Refusal():
                raise JoinError(message.message, hint=message.hint)
            case _:
                pass

    def tick(self, now: float) -> None:
        """Find out whether those that are waited for are there, and ask again what may be lost."""
        for shard in self._met.intersection(self.missing()):
            self.outbox.append((shard, say.Beat(now)))
        for request in self._requests.due(now, self._may_be_lost):
            self.outbox.append((request.shard, request.message))

    def leave(self) -> None:
        """Say goodbye to all shards."""
        self.outbox.extend((shard, say.Leave()) for shard in range(self._shards))

    @property
    def _is_looking(self) -> bool:
        return any(isinstance(request.message, say.Follow) for request in self._requests)

    def _may_be_lost(self, request: Request) -> bool:
        """Whether a beat that was sent after a question has come back, and its answer has not.

        A question for a round that has not come yet is repeated too: the pauses grow.
        """
        is_met = request.shard in self._met  # before, a shard does not send beats back
        return not is_met or self._echoed_at[request.shard] > request.asked_at

    def _look(self, now: float) -> None:
        """Forget what was asked for, and ask all shards how far they are."""
        self._gatherings.clear()
        if not self._is_looking:
            self._requests = Requests()
            self._ask_all(now)

    def _ask_all(self, now: float) -> None:
        self._begun.clear()
        for shard in range(self._shards):
            follow = say.Follow(
                protocol=say.PROTOCOL,
                run=self.run,
                shard=shard,
                shards=self._shards,
                knows=self._state is not None,
            )
            self._ask(("follow", shard), shard, follow, now)

    def _ask(
        self, key: tuple[str, int] | tuple[str, int, int], shard: int, message: Message, now: float
    ) -> None:
        self._requests.add(key, Request(shard, message, EMPTY, now))
        self.outbox.append((shard, message))

    def _followed(self, shard: int, answer: say.Followed, payload: memoryview, now: float) -> None:
        if ("follow", shard) not in self._requests:
            return
        self._met.add(shard)
        if answer.round < 0:
            return
        if payload.nbytes:
            self._meet(shard, answer, payload)
        elif self._state is None:
            raise WireError("a shard tells nothing of the model", hint="check both sides' versions")
        self._requests.answered(("follow", shard))
        self._begun[shard] = answer.round
        if len(self._begun) < self._shards or not self._is_wanted:
            return
        newest = max(self._begun.values())
        if newest <= self.last and self._spare is not None:
            self._give_spare()
        else:
            self._spare = None
            self._begin_at(max(newest, self.last + 1), now)

    def _give_spare(self) -> None:
        if self._spare is not None:
            self.ready.append(self._spare)
            self._spare = None

    def _meet(self, shard: int, answer: say.Followed, payload: memoryview) -> None:
        """Learn what the model is; all shards must say the same."""
        table = read_table(payload)
        if self._state is None:
            self.run, self._state = answer.run, _State(table, self._shards)
        elif (answer.run, table) != (self.run, self._state.table):
            raise JoinError(
                f"shard {shard} belongs to run `{answer.run}` or to another model, others to `{self.run}`",
                hint="give the addresses of all shards of one run, in their order",
            )

    def _begin_at(self, seq: int, now: float) -> None:
        """Ask for a whole round, and where every round is wanted for what follows it."""
        self._fetch(seq, now)
        if self._wants_every and self._is_whole:
            self._fetch(seq + 1, now, follows=True)

    def _fetch(self, seq: int, now: float, *, follows: bool = False) -> None:
        state = self._known()
        self._gatherings[seq] = _Gathering(seq, self._is_whole)
        for shard in sorted(set(state.homes)):
            fetch = say.Fetch(seq, self._is_whole, follows and self._is_whole)
            self._ask(("fetch", seq, shard), shard, fetch, now)
        if not state.parts:  # a model without parameters
            self._complete(self._gatherings[seq], now)

    def _take(self, shard: int, message: say.Full | say.Delta, payload: memoryview, now: float) -> None:
        gathering = self._gatherings.get(message.seq)
        if gathering is None:  # it was given up meanwhile
            return
        homes = self._known().homes
        if not 0 <= message.part < len(homes) or homes[message.part] != shard:
            raise WireError(
                f"shard {shard} sent part {message.part}, which it does not have",
                hint="check the order of shard addresses",
            )
        gathering.parts[message.part] = (message, payload)
        if all(index in gathering.parts for index, home in enumerate(homes) if home == shard):
            self._requests.answered(("fetch", message.seq, shard))
        if len(gathering.parts) == len(homes):
            self._complete(gathering, now)

    def _complete(self, gathering: _Gathering, now: float) -> None:
        state = self._known()
        self._give_up(lambda seq: seq <= gathering.round)
        if not all(state.fits(index, message) for index, (message, _) in gathering.parts.items()):
            self._look(now)  # the round before, which this one continues, did not come
            return
        for index, (message, payload) in sorted(gathering.parts.items()):
            state.take(index, message, payload)
        self.last, self._misses = gathering.round, 0
        self.ready.append(state.version(gathering.round, gathering.whole))

    def _passed(self, passed: say.Passed, now: float) -> None:
        if passed.asked not in self._gatherings:
            return
        self._give_up(lambda seq: seq >= passed.asked)
        if self._gatherings:
            return  # an earlier round is still coming in; when it has, the later one is asked for again
        self._is_whole = passed.whole
        room = (1 << min(self._misses, _LONGEST_STRIDE)) - 1 if passed.whole else 0
        self._misses += 1
        self._begin_at(max(passed.round + room, self.last + 1), now)

    def _give_up(self, is_meant: Callable[[int], bool]) -> None:
        for seq in [seq for seq in self._gatherings if is_meant(seq)]:
            del self._gatherings[seq]
            for shard in range(self._shards):
                self._requests.answered(("fetch", seq, shard))

    def _known(self) -> _State:
        if self._state is None:
            raise WireError("a shard sent parameters of a model unknown", hint="check both sides' versions")
        return self._state
