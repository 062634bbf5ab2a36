"""Who takes part, and who has not been heard of for too long.

A worker is expected from the start of the run, so that no round goes on before all are
there. Once it has entered it holds a lease that every message renews. A lease that runs
out, or a leave, takes the worker out of the rounds it has not contributed to; it may come
back as a new incarnation, at a round that no part here has begun.

Incarnations are counted here, for each shard: a process that says hello as a worker gets the next
number, or the count that the launcher gave it if that is higher. No clock takes part. A process that
a launcher has started before the one that is here is refused.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from shoestring.errors import JoinError, StaleWorkerError, WireError
from shoestring.wire.messages import PROTOCOL, WORKER_LIMIT, Decisions, Hello
from shoestring.wire.shared import Segment

_REPLACED = 64  # connections of replaced processes that are told why


@dataclass
class Member:
    """One worker as a shard sees it. `entered` 0: it has said hello, no more."""

    worker: int
    life: str  # of its process
    start: int  # which start of the worker it is, as a launcher has counted; 0: not counted
    incarnation: int
    identity: bytes
    heard_at: float
    entered: int = 0
    present: bool = True
    segment: Segment | None = None  # memory this worker writes, on the same machine
    shares: bool = False  # it reads the shard's
    refusals: int = 0  # rounds it asked to enter at that had begun already


class Members:
    """The workers of a run. Times are monotonic seconds, given by the caller."""

    def __init__(self, lease_s: float) -> None:
        self.lease_s = lease_s
        self.expected = 0
        self._members: dict[int, Member] = {}
        self._seen: set[int] = set()
        self._by_identity: dict[bytes, Member] = {}
        self._replaced: deque[bytes] = deque(maxlen=_REPLACED)

    def __iter__(self) -> Iterator[Member]:
        return iter(sorted(self._members.values(), key=lambda member: member.worker))

    def greet(self, hello: Hello, applied: int, identity: bytes, now: float) -> Member:
        """Take note of a worker; a newer process takes the place of an older one.

        `applied` is the last incarnation of the worker that the ledgers know of.
        """
        worker, workers = hello.worker, hello.workers
        expected = self.expected or workers
        if workers != expected or not 0 <= worker < workers <= WORKER_LIMIT:
            raise JoinError(
                f"worker {worker} of {workers} does not fit a run of {expected} workers",
                hint="start all workers of a run with the same number of workers",
            )
        other = self._by_identity.get(identity)
        if other is not None and other.worker != worker:
            raise JoinError(
                f"worker {worker} came over the connection of worker {other.worker}",
                hint="give every worker a connection of its own",
            )
        known = self._members.get(worker)
        if known is not None and hello.life == known.life:
            if not known.present:
                raise self._gone(known)
            self._move(known, identity)
            known.heard_at = now
            return known
        if known is not None and (hello.incarnation < known.start or identity in self._replaced):
            raise StaleWorkerError(
                f"worker {worker} is already here as a later process",
                hint="stop the older process; two workers are running under one id",
            )
        if known is not None:
            applied = max(applied, known.incarnation)
            self._by_identity.pop(known.identity, None)
            self._replaced.append(known.identity)
        self.expected = expected
        incarnation = max(hello.incarnation, applied + 1)
        member = Member(worker, hello.life, hello.incarnation, incarnation, identity, now)
        self._members[worker] = self._by_identity[identity] = member
        return member

    @property
    def have_all_come(self) -> bool:
        """Whether every worker of the run has said hello."""
        return 0 < self.expected == len(self._members)

    def get(self, worker: int) -> Member | None:
        """The member of a number, whether it is present or not."""
        return self._members.get(worker)

    def of(self, identity: bytes, now: float) -> Member:
        """The member behind a connection, its lease renewed."""
        member = self._by_identity.get(identity)
        if member is None:
            if identity in self._replaced:
                raise StaleWorkerError(
                    "another process has taken this worker's place",
                    hint="stop this process; two workers are running under one id",
                )
            raise JoinError("a message from a worker that has not said hello", hint="start the worker again")
        if not member.present:
            raise self._gone(member)
        member.heard_at = now
        return member

    def has_left(self, identity: bytes) -> bool:
        """Say whether the connection is of a member that has left."""
        member = self._by_identity.get(identity)
        return member is not None and not member.present

    def enter(self, member: Member, seq: int) -> None:
        """Count the member in from round `seq` on."""
        member.entered = seq
        self._seen.add(member.worker)

    def due(self, seq: int) -> list[int] | None:
        """The workers a round waits for, in order; `None` until all have entered for the first time."""
        if len(self._seen) < max(self.expected, 1):
            return None
        return [m.worker for m in self if m.present and 0 < m.entered <= seq]

    def first_entry(self) -> int | None:
        """The earliest round at which a present member entered: no push of an earlier round will come."""
        return min((m.entered for m in self if m.present and m.entered), default=None)

    def check(self, decisions: Decisions | None) -> None:
        """Raise unless what a worker has decided can be passed on to all."""
        if decisions is None:
            return
        shares = decisions.shares
        does_fit = shares is None or len(shares.samples) == self.expected
        if len(decisions.paces) > 1 or len(decisions.witnesses) > 1 or not does_fit:
            raise WireError(
                f"decisions that do not fit a run of {self.expected} workers",
                hint="check both sides' versions",
            )

    def lapse(self, now: float) -> list[Member]:
        """Take out the members whose lease has run out, and name them."""
        gone = [m for m in self if m.present and m.entered and now - m.heard_at > self.lease_s]
        for member in gone:
            member.present = False
        return gone

    def _move(self, member: Member, identity: bytes) -> None:
        """Speak with a member over another connection from now on."""
        self._by_identity.pop(member.identity, None)
        member.identity = identity
        self._by_identity[identity] = member

    def _gone(self, member: Member) -> StaleWorkerError:
        return StaleWorkerError(
            f"worker {member.worker} left, or was not heard of for {self.lease_s:g} s; "
            "the others went on without it",
            hint="start the worker again: it joins at the next round",
        )


def check_hello(hello: Hello, run: str, shard: int, shards: int) -> None:
    """Raise unless a worker has come to the shard that it looks for."""
    if hello.protocol != PROTOCOL:
        raise JoinError(
            f"the worker speaks protocol {hello.protocol}, this shard {PROTOCOL}",
            hint="install the same version of shoestring on all hosts",
        )
    if (hello.run, hello.shard, hello.shards) != (run, shard, shards):
        raise JoinError(
            f"the worker looks for shard {hello.shard} of {hello.shards} of run `{hello.run}`; "
            f"this is shard {shard} of {shards} of run `{run}`",
            hint="check the list of shard addresses, and that no shard of another run uses the port",
        )
