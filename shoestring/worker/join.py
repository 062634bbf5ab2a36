"""Enter a run: agree with every shard on the model and on the first round, then get the parameters."""

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import numpy as np
import zmq

from shoestring.config import Run
from shoestring.errors import JoinError, LinkError, StaleWorkerError
from shoestring.model.parts import Part
from shoestring.model.table import Table
from shoestring.wire import frames
from shoestring.wire import messages as say
from shoestring.wire.messages import Message
from shoestring.wire.shared import Segment
from shoestring.worker.replica import Replica

T = TypeVar("T", bound=Message)

_OTHERS = 10  # times `timeout_s`: how long other workers may take to start
_PATIENCE_S = 5.0  # before saying what is being waited for


@dataclass
class Entry:
    """Where a worker comes in."""

    first_round: int
    versions: list[int]
    shared: list["SharedPair | None"]  # with each shard
    statistics: list[bytes]  # of the layers that go with each part


@dataclass
class SharedPair:
    """Memory shared with one shard: what this worker writes, what the shard writes."""

    own: Segment
    theirs: Segment
    places: dict[int, int]  # of each part


class Door:
    """The first talk with the shards, before the exchange begins. One thread, no overlap."""

    def __init__(
        self,
        run: Run,
        incarnation: int,
        sockets: list[tuple[str, "zmq.Socket[bytes]"]],
        notice: Callable[[str], None],
    ) -> None:
        self._run = run
        self._incarnation = incarnation
        self._sockets = sockets
        self._notice = notice
        self._welcomed: list[int] = []
        self._noticed: set[int] = set()

    def enter(self, table: Table, replica: Replica, homes: tuple[int, ...]) -> Entry:
        """Join all shards; afterwards the replica holds what the shards hold."""
        own = [
            self._offer(address, shard, replica, homes) for shard, (address, _) in enumerate(self._sockets)
        ]
        welcomes = self._greet(msgspec.msgpack.encode(table), own)
        shared = [
            self._accept(segment, welcome.shared, shard, replica, homes)
            for shard, (segment, welcome) in enumerate(zip(own, welcomes, strict=True))
        ]
        first = max(welcome.round for welcome in welcomes) + 1
        while True:
            for shard, pair in enumerate(shared):
                self._send(shard, say.Enter(first, pair is not None))
            answers = [self._expect(shard, say.Entered) for shard in range(len(self._sockets))]
            if all(answer.agreed for answer, _ in answers):
                break
            first = max(answer.round for answer, _ in answers)
        versions = [0] * len(replica.parts)
        statistics = [b""] * len(replica.parts)
        pulled: list[list[Part]] = [[] for _ in self._sockets]
        for part in replica.parts:
            shard = homes[part.index]
            if welcomes[shard].empty and self._run.worker == 0:
                self._send(shard, say.Init(part.index), replica.read(part).view(np.uint8).data)
            # The first worker too: what the shard holds counts, should it hold something already.
            self._send(shard, say.Pull(part.index, first - 1))
            pulled[shard].append(part)
        for shard, parts in enumerate(pulled):
            for _ in parts:
                full, payload = self._expect(shard, say.Full)
                replica.write(replica.parts[full.part], np.frombuffer(payload, np.float32).copy())
                versions[full.part] = full.version
                statistics[full.part] = full.statistics
        return Entry(first, versions, shared, statistics)

    def _offer(self, address: str, shard: int, replica: Replica, homes: tuple[int, ...]) -> Segment | None:
        """Make memory to share with a shard that is reached without a network."""
        if not address.startswith("ipc:"):
            return None
        return Segment.create([part.size for part in replica.parts if homes[part.index] == shard])

    def _accept(
        self, own: Segment | None, name: str, shard: int, replica: Replica, homes: tuple[int, ...]
    ) -> SharedPair | None:
        """Open the shard's memory, if it has opened ours; in any case nobody else will open ours."""
        if own is None:
            return None
        own.unlink()
        indices = [part.index for part in replica.parts if homes[part.index] == shard]
        theirs = Segment.open(name, [replica.parts[index].size for index in indices])
        if theirs is None:
            own.close()
            return None
        return SharedPair(own, theirs, {index: place for place, index in enumerate(indices)})

    def _greet(self, table: bytes, shared: list[Segment | None]) -> list[say.Welcome]:
        run, shards = self._run, len(self._sockets)
        for shard, segment in enumerate(shared):
            name = segment.name if segment is not None else ""
            hello = say.Hello(
                say.PROTOCOL, run.name, run.worker, run.workers, self._incarnation, shard, shards, name
            )
            self._send(shard, hello, table)
        welcomes = []
        for shard in range(len(self._sockets)):
            welcomes.append(self._expect(shard, say.Welcome)[0])
            self._welcomed.append(shard)
        return welcomes

    def _send(self, shard: int, message: Message, payload: frames.Buffer = b"") -> None:
        self._wait(shard, zmq.POLLOUT, time.monotonic())  # the shard must have let it in first
        self._sockets[shard][1].send_multipart(frames.encode(message, payload), copy=False)

    def _expect(self, shard: int, kind: type[T]) -> tuple[T, memoryview]:
        """Wait for one message of a kind from one shard."""
        began = time.monotonic()
        message: Message = say.Beat(0.0)
        while isinstance(message, say.Beat):  # an echo
            self._wait(shard, zmq.POLLIN, began, awaits_others=kind is say.Full)
            received = self._sockets[shard][1].recv_multipart(copy=False)
            message, payload = frames.decode([frame.buffer for frame in received])
        if isinstance(message, say.Refusal):
            error = StaleWorkerError if message.stale else JoinError
            raise error(f"shard {shard} refused: {message.message}", hint=message.hint)
        if not isinstance(message, kind):
            raise JoinError(
                f"shard {shard} answered `{type(message).__name__}` where `{kind.__name__}` was expected",
                hint="install the same version of shoestring on all hosts",
            )
        return message, payload

    def _beat(self) -> None:
        """Keep the lease with the shards that know this worker."""
        for shard in self._welcomed:
            with contextlib.suppress(zmq.Again):
                self._sockets[shard][1].send_multipart(frames.encode(say.Beat(time.monotonic())), zmq.NOBLOCK)

    def _wait(self, shard: int, event: int, began: float, *, awaits_others: bool = False) -> None:
        """Wait until a shard's socket can be read or written; say so if it takes long since `began`.

        Parameters come when the first worker has brought them, or the others' round is over: that
        may take longer than an answer.
        """
        address, socket = self._sockets[shard]
        limit_s = self._run.timeout_s * (_OTHERS if awaits_others else 1)
        whom = "other workers at " if awaits_others else ""
        while not socket.poll(1000, event):
            self._beat()
            waited = time.monotonic() - began
            if waited > _PATIENCE_S and shard not in self._noticed:
                self._noticed.add(shard)
                self._notice(f"waiting for {whom}shard {shard} ({address}), up to {limit_s:g} s")
            if waited > limit_s and awaits_others:
                raise JoinError(
                    f"shard {shard} at `{address}` had no parameters to give for {limit_s:g} s",
                    hint="check that the first worker runs and that all workers could join",
                )
            if waited > limit_s:
                raise LinkError(
                    f"shard {shard} at `{address}` did not answer for {limit_s:g} s",
                    hint="check that it runs (`shoestring serve`), that the address is right, that no "
                    "firewall is between, and, with keys, that this worker's public key is on its allow-list",
                )
