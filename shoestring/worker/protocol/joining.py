"""Enter a run: agree with every shard on the model and on the first round, then ask for the parameters.

Three questions, each to all shards before the next: `Hello`, `Enter`, `Pull`. If any shard has
begun the round that a worker wants to enter at, it names a later one and all are asked again.
The first worker brings the parameters of parts that a shard does not hold yet.

A small model has fewer parts than there are shards. Those without parts are told who comes, so that they
know when all have left, but nothing is waited for.
"""

import enum
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from shoestring.errors import UsageError
from shoestring.wire import messages as say
from shoestring.wire.messages import Message
from shoestring.worker.protocol.requests import EMPTY, Request, Requests

Outgoing = tuple[int, Message, memoryview]  # to this shard


class Stage(enum.Enum):
    """How far a worker has come; each but the last waits for an answer of every shard."""

    HELLO = "hello"
    ENTER = "enter"
    PULL = "pull"
    DONE = "done"


@dataclass(frozen=True)
class Identity:
    """Who asks to take part."""

    run: str
    worker: int
    workers: int
    life: str  # differs from process to process
    incarnation: int = 0  # as counted by the launcher that starts processes; 0: not counted


class Memory(Protocol):
    """Memory shared with shards on this machine."""

    def offer(self, shard: int) -> str:
        """Make memory for a shard to read; return its name, empty where there is none."""

    def accept(self, shard: int, name: str) -> bool:
        """Open the memory that a shard writes; say whether both sides have each other's."""


class Joining:
    """Asks until all shards have let this worker in and given their parameters."""

    def __init__(
        self,
        who: Identity,
        table: memoryview,
        homes: Sequence[int],
        shards: int,
        outbox: deque[Outgoing],
        *,
        initial: Callable[[int], memoryview],
        names: tuple[str, ...],
        memory: Memory | None,
        now: float,
    ) -> None:
        if not homes:
            raise UsageError("the model has no trainable parameters", hint="check `requires_grad`")
        self.stage = Stage.HELLO
        self.stage_at = now  # when the stage began
        self.first_round = 0
        self.incarnations = [0] * shards  # of this worker, as each shard counts
        self._requests = Requests()
        self._idle_requests = Requests()  # to shards without parts
        self._homes = homes
        self._outbox = outbox
        self._initial = initial
        self._names = names
        self._memory = memory
        self._begun = [0] * shards  # the last round that each shard has begun
        self._is_sharing = [False] * shards
        self._earliest = 0  # the earliest round that all shards would agree to, if one was too late
        self._echoed_at = [float("-inf")] * shards  # when the last beat was sent that came back
        for shard in range(shards):
            hello = say.Hello(
                protocol=say.PROTOCOL,
                run=who.run,
                worker=who.worker,
                workers=who.workers,
                life=who.life,
                incarnation=who.incarnation,
                shard=shard,
                shards=shards,
                shared=memory.offer(shard) if memory is not None else "",
            )
            self._ask(("hello", shard), shard, hello, now, table, is_idle=shard not in homes)

    def is_known(self, shard: int) -> bool:
        """Whether a shard has answered the `Hello`: before that it takes nothing else."""
        return self.incarnations[shard] > 0

    def missing(self) -> list[int]:
        """The shards whose answers are waited for."""
        return sorted({request.shard for request in self._requests})

    def take(self, shard: int, message: Message, now: float) -> bool:
        """Take one message; say whether it brings the parameters of a part that were waited for."""
        match message:
            case say.Welcome():
                self._welcome(shard, message, now)
            case say.Entered():
                self._entered(shard, message, now)
            case say.Missing() if ("pull", message.part) in self._requests:
                init = say.Init(message.part, self._names)
                self._outbox.append((shard, init, self._initial(message.part)))
                self._pull(message.part, now)
            case say.Full() if self._requests.answered(("pull", message.part)):
                if not self._requests:
                    self.stage = Stage.DONE
                return True
            case say.Beat():
                self._echoed_at[shard] = max(self._echoed_at[shard], message.at)
            case _:
                pass  # an answer that came twice, or late
        return False

    def tick(self, now: float) -> None:
        """Ask again what has no answer."""
        for request in self._requests.due(now, self._may_be_lost):
            self._outbox.append((request.shard, request.message, request.payload))
        self.tick_idle(now)

    def tick_idle(self, now: float) -> None:
        """Ask shards without parts again: also after this worker has entered."""
        for request in self._idle_requests.due(now):
            self._outbox.append((request.shard, request.message, request.payload))

    def take_idle(self, shard: int, message: say.Welcome | say.Entered, now: float) -> None:
        """Take the answer of a shard without parts, whenever it comes."""
        if isinstance(message, say.Entered):
            self._idle_requests.answered(("enter", shard))
        elif self._idle_requests.answered(("hello", shard)):
            self.incarnations[shard] = message.incarnation
            self._ask(("enter", shard), shard, say.Enter(1), now, is_idle=True)  # it has no rounds

    def _may_be_lost(self, request: Request) -> bool:
        """Whether an answer is not merely still on its way.

        Parameters take long on a slow link. A beat that was sent after the question and has come
        back overtook nothing: an answer that the shard gave before it would be here.
        """
        return not isinstance(request.message, say.Pull) or self._echoed_at[request.shard] > request.asked_at

    def _ask(
        self,
        key: tuple[str, int],
        shard: int,
        message: Message,
        now: float,
        payload: memoryview = EMPTY,
        *,
        is_idle: bool = False,
    ) -> None:
        requests = self._idle_requests if is_idle else self._requests
        requests.add(key, Request(shard, message, payload, now))
        self._outbox.append((shard, message, payload))

    def _welcome(self, shard: int, welcome: say.Welcome, now: float) -> None:
        if not self._requests.answered(("hello", shard)):
            return
        self.incarnations[shard] = welcome.incarnation
        self._begun[shard] = welcome.round
        if self._memory is not None:
            self._is_sharing[shard] = self._memory.accept(shard, welcome.shared)
        if not self._requests:
            self._enter(max(self._begun) + 1, now)

    def _entered(self, shard: int, answer: say.Entered, now: float) -> None:
        if answer.asked != self.first_round or not self._requests.answered(("enter", shard)):
            return
        if not answer.agreed:
            self._earliest = max(self._earliest, answer.round)
        if self._requests:
            return
        if self._earliest:
            self._enter(max(self._earliest, self.first_round + 1), now)
            return
        self.stage, self.stage_at = Stage.PULL, now
        for part in range(len(self._homes)):
            self._pull(part, now)

    def _enter(self, first: int, now: float) -> None:
        self.stage, self.stage_at, self.first_round, self._earliest = Stage.ENTER, now, first, 0
        for shard in sorted(set(self._homes)):
            self._ask(("enter", shard), shard, say.Enter(first, self._is_sharing[shard]), now)

    def _pull(self, part: int, now: float) -> None:
        self._ask(("pull", part), self._homes[part], say.Pull(part, self.first_round - 1), now)
