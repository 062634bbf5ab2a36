"""One shard's side of the protocol, without sockets, clocks or threads.

`handle` takes one message and may leave messages in `outbox`; `next_work` gives updates
that are ready to be computed, lowest part first, as the next forward pass needs it first;
`finish` takes a computed update back. The caller owns time, threads and sockets, so that
a test can drive any number of shards through any fault, step by step.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from shoestring.checkpoint.records import Records
from shoestring.codec.base import Vector
from shoestring.errors import JoinError, ShoestringError, StaleWorkerError, WireError
from shoestring.model.parts import assign
from shoestring.model.table import (
    Table,
    check_table,
    first_difference,
    parts_of,
    read_table,
)
from shoestring.model.vectors import PARAMS, unpack
from shoestring.server.followers import Followers
from shoestring.server.holding import Holding, Reply
from shoestring.server.ledger import PushLedger
from shoestring.server.members import Member, Members, check_hello
from shoestring.server.readers import Readers
from shoestring.server.rounds import PartRounds, holding_of
from shoestring.server.sharing import SharedMemory
from shoestring.server.work import Commits, Waiting, Work
from shoestring.wire import messages as say
from shoestring.wire.messages import ROUND_LIMIT, Message

Outgoing = tuple[bytes, Message, memoryview]
_EMPTY = memoryview(b"")

PROBE_LIMIT = 1 << 20  # bytes of a beat that are sent back
TEXT_LIMIT = 2000  # of a refusal, which may quote what came
_LONGEST_STRIDE = 10  # doublings of the rounds that a worker which came too late is sent ahead


@dataclass
class Shard:
    """The parts this shard holds and the workers it serves."""

    index: int
    shards: int
    run: str = ""
    lease_s: float = 20.0
    is_sharing: bool = False  # whether workers on this machine may hand over values in memory
    restore: Callable[[Holding], tuple[int, PushLedger] | None] = lambda holding: None
    outbox: deque[Outgoing] = field(default_factory=deque)
    departed: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.members = Members(self.lease_s)
        self._memory = SharedMemory()
        self.table: Table | None = None
        self.parts: dict[int, PartRounds] = {}
        self.is_filled: set[int] = set()
        self._readers = Readers(self.members, self._send)
        self._followers = Followers(self, self._send)
        self._asks: dict[tuple[int, int], say.Ask] = {}  # by part and worker: the part is being worked on
        self._commits = Commits()
        self._waiting = Waiting(self._contributors, self._send)
        self._decided: list[Work] = []
        self._stirred: set[int] = set()  # parts that may have work
        self._spares: list[Vector] = []  # memory for sums, used again
        self._records = Records(waits_for_workers=self.index == 0)
        self._failure: ShoestringError | None = None
        self.moved = ""  # the policy by which workers go on, as another model

    def beside(self) -> "Shard":
        """The shard of a further model of the same run."""
        return Shard(self.index, self.shards, self.run, self.lease_s, self.is_sharing)

    def handle(self, sender: bytes, message: Message, payload: memoryview, now: float) -> None:
        """Do what a message asks; a `ShoestringError` becomes a refusal."""
        try:
            self._dispatch(sender, message, payload, now)
        except ShoestringError as error:
            self.refuse(sender, error)

    def refuse(self, sender: bytes, error: ShoestringError) -> None:
        """Tell a worker why not."""
        is_stale = isinstance(error, StaleWorkerError)
        self._send(sender, say.Refusal(error.message[:TEXT_LIMIT], error.hint[:TEXT_LIMIT], is_stale))

    def _dispatch(self, sender: bytes, message: Message, payload: memoryview, now: float) -> None:
        if isinstance(message, say.Hello):
            self._hello(sender, message, payload, now)
            return
        if isinstance(message, say.Follow) and self.moved:
            raise JoinError(
                f"the run goes on with policy `{self.moved}`, as another of its models",
                hint="follow the model that was wrapped after this one: `shoestring.follow(..., model=1)`",
            )
        if isinstance(message, say.Follow | say.Fetch) or sender in self._followers.known:
            self._followers.handle(sender, message, now)
            return
        if isinstance(message, say.Leave) and self.members.has_left(sender):
            self._send(sender, say.Left())  # the first answer was lost
            return
        member = self.members.of(sender, now)
        match message:
            case say.Push():
                self._push(member, message, payload)
            case say.Beat():
                self._send(sender, message, payload if payload.nbytes <= PROBE_LIMIT else _EMPTY)
            case say.Enter():
                member.shares = message.shares and member.segment is not None
                self._enter(member, message.round)
            case say.Init():
                self._init(message, payload)
            case say.Pull():
                self._pull(member, message)
            case say.Commit():
                self._commit(member, message)
            case say.Put():
                self._put(member, message, payload)
            case say.AskState():
                self._ask_state(member, message)
            case say.Scale():
                self._scale(message)
            case say.Ask():
                self._ask(member, message)
            case say.Saved():
                self._records.add(member.worker, message.round, payload)
                self._send(sender, say.Recorded(message.round))
                self._report_saved()
            case say.AskSnapped():
                self._report_again(member, message.round)
            case say.Leave():
                self.moved = self.moved or message.moved
                self._depart(member)
                self._send(sender, say.Left())
            case _:
                raise WireError(
                    f"a shard does not take `{type(message).__name__}`", hint="check both sides' versions"
                )

    def _hello(self, sender: bytes, hello: say.Hello, payload: memoryview, now: float) -> None:
        if self._failure is not None:
            raise self._failure
        check_hello(hello, self.run, self.index, self.shards)
        table = read_table(payload)
        parts = self.parts
        if self.table is None:
            parts = self._build(table)
        elif difference := first_difference(self.table, table):
            raise JoinError(
                f"worker {hello.worker}'s model differs from the others': {difference}",
                hint="build the same model with the same settings on every worker",
            )
        before = self.members.get(hello.worker)
        self._refuse_latecomer(hello, before)
        applied = max((rounds.ledger.incarnation(hello.worker) for rounds in parts.values()), default=0)
        member = self.members.greet(hello, applied, sender, now)
        if before is not None and before is not member and before.present:
            self._depart(before)
        self.table, self.parts = table, parts
        self._followers.tell()
        welcome = say.Welcome(
            protocol=say.PROTOCOL,
            incarnation=member.incarnation,
            round=self._begun(),
            lease_s=self.lease_s,
            shared=self._memory.open(member, hello.shared, parts) if self.is_sharing and hello.shared else "",
        )
        self._send(sender, welcome)

    def _refuse_latecomer(self, hello: say.Hello, before: Member | None) -> None:
        """Raise if the parameters are not here for a process to start from: the workers update them."""
        if self.moved:
            raise JoinError(
                f"worker {hello.worker} comes to a run that goes on with policy `{self.moved}`, chosen after "
                "its first rounds",
                hint="start all workers again; a run that is given its policy takes workers in at any round",
            )
        is_mean = self.table is not None and self.table.rule.kind == "mean"
        if is_mean and self._begun() and (before is None or before.life != hello.life):
            raise JoinError(
                f"worker {hello.worker} comes at round {self._begun()}, and only workers have the parameters",
                hint="start all workers again from the script's own checkpoint; a run of "
                "`wrap(model, optimizer)` takes workers in at any round",
            )

    @property
    def is_followed(self) -> bool:
        """Whether programs that are no workers read here."""
        return bool(self._followers.known)

    def show_next(self) -> bool:
        """Send followers a part that has come to the next round; return whether there was one."""
        return self._followers.show_next()

    def end(self) -> None:
        """Tell followers that nothing more comes."""
        self._followers.end()

    def close(self) -> None:
        """Let go of shared memory."""
        self._memory.close()

    def _build(self, table: Table) -> dict[int, PartRounds]:
        check_table(table)
        everywhere = parts_of(table)
        homes = assign(everywhere, self.shards)
        parts = {}
        for part in everywhere:
            if homes[part.index] != self.index:
                continue
            try:
                holding = holding_of(part, table)
            except MemoryError:
                raise JoinError(
                    f"the model does not fit into the memory of shard {self.index}",
                    hint="add hosts with shards, or memory",
                ) from None
            restored = self.restore(holding)
            if restored is not None:
                self.is_filled.add(part.index)
            done, ledger = restored or (0, PushLedger())
            is_clipped = table.clip_norm > 0
            parts[part.index] = PartRounds(
                holding, ledger, is_clipped, self._commits, done, spares=self._spares
            )
        return parts

    def _begun(self) -> int:
        return max((rounds.begun for rounds in self.parts.values()), default=0)

    def _enter(self, member: Member, first: int) -> None:
        if first < member.entered:
            return  # an earlier question that came late: another shard has refused that round
        earliest = self._begun() + 1
        agreed = first == member.entered or earliest <= first <= ROUND_LIMIT
        if agreed and first != member.entered:
            for rounds in self.parts.values():
                rounds.ledger.refuse_older(member.worker, member.incarnation)
            for rounds in self.parts.values():
                rounds.enter(member.worker, member.incarnation, first)
            self.members.enter(member, first)
            self._stirred.update(self.parts)
            for index in self.parts:
                self._release(index)
        elif not agreed:  # rounds may go by faster than messages: leave more and more room
            earliest += 1 << min(member.refusals, _LONGEST_STRIDE)
            member.refusals += 1
        self._send(member.identity, say.Entered(first, first if agreed else earliest, agreed))

    def _pull(self, member: Member, pull: say.Pull) -> None:
        self._rounds_of(pull.part)
        self._readers.ask(member.worker, pull)
        if pull.part not in self.is_filled and member.worker == 0:  # the first worker brings parameters
            self._send(member.identity, say.Missing(pull.part, 0))
        self._answer_readers()

    def _init(self, init: say.Init, payload: memoryview) -> None:
        index = init.part
        holding = self._rounds_of(index).holding
        is_left_out = holding.is_mean and not payload.nbytes  # the workers have seen to it themselves
        vectors = {} if is_left_out else unpack(init.names, payload, holding.part, holding.rule)
        if PARAMS not in vectors and not is_left_out:
            raise WireError(f"part {index} came without parameters", hint="check both sides' versions")
        if index not in self.is_filled:
            if not is_left_out:
                holding.put(vectors)
                holding.has_values = True
            self.is_filled.add(index)
            self._stirred.add(index)
        self._answer_readers()
        self._show_followers([index])

    def _ask_state(self, member: Member, ask: say.AskState) -> None:
        self._rounds_of(ask.part)
        self._readers.ask(member.worker, ask)
        self._answer_readers()

    def _push(self, member: Member, push: say.Push, payload: memoryview) -> None:
        if not member.entered or push.incarnation != member.incarnation:
            raise WireError("a push from a worker that has not entered", hint="start the worker again")
        if not push.worker == push.sender == member.worker:
            raise WireError(
                f"worker {member.worker} sent a push of worker {push.sender} that counts for {push.worker}",
                hint="check both sides' versions",
            )
        if self.table is None or len(push.hyper) != self.table.groups:
            raise WireError(f"hyperparameters of {len(push.hyper)} groups", hint="check both sides' versions")
        if push.commit is not None and push.commit.seq != push.seq:
            raise WireError("a push with the commit of another round", hint="check both sides' versions")
        self.members.check(push.decisions)
        self._stirred.add(push.part)
        if push.slot >= 0:
            self._rounds_of(push.part)
            payload = self._memory.values(member, push, self.parts)
        is_applied = self._rounds_of(push.part).push(push, payload)
        if push.commit is not None:
            self._commit(member, push.commit)
        if is_applied:
            self._ask(member, say.Ask(push.part, push.seq, push.have))

    def _ask(self, member: Member, ask: say.Ask) -> None:
        """Send the answer, or say that the push is missing; no answer: the round waits for other workers."""
        rounds, worker = self._rounds_of(ask.part), member.worker
        if not member.entered:
            raise WireError("a question from a worker that has not entered", hint="start the worker again")
        if not rounds.has(worker, ask.seq):
            self._send(member.identity, say.Missing(ask.part, ask.seq))
        elif self._waiting.has(ask.seq, ask.part):
            self._waiting.remind(ask.seq, ask.part, member)
        elif rounds.ledger.seq(worker) >= ask.seq and not rounds.is_held(worker, ask.seq):
            replies = rounds.answer(worker, ask.seq, ask.have)
            if replies is None:
                self._asks[ask.part, worker] = ask
            else:
                self._reply(ask.part, member, replies, ask.seq)

    def _rounds_of(self, index: int) -> PartRounds:
        rounds = self.parts.get(index)
        if rounds is None:
            raise WireError(
                f"part {index} is not on shard {self.index}", hint="check the order of shard addresses"
            )
        return rounds

    def next_work(self) -> Work | None:
        """Return an update that is ready to be computed, the lowest part first."""
        if self._decided:
            return self._decided.pop(0)
        for index in sorted(self._stirred):
            if index in self.is_filled:
                if self._followers.known and self.parts[index].has_pushes:
                    self._followers.show(index)  # before it changes
                work = self.parts[index].next_work(self.members)
                if work is not None:
                    return work
            self._stirred.discard(index)
        self._answer_readers()  # a part may have passed over rounds that nobody took part in
        return None

    def finish(self, work: Work) -> None:
        """Take back computed work and answer the workers."""
        rounds, index = work.rounds, work.rounds.holding.part.index
        if work.reply is None:
            self._waiting.add(index, work)
            if self._waiting.drop_orphan(index, work):
                self._stirred.add(index)
            else:
                self._go_on(work.seq)
            return
        reply = rounds.finish(work)
        self._stirred.add(index)
        if work.is_whole:
            for member in self._contributors(work):
                self._reply(index, member, [reply], work.seq)
        self._release(index)
        for part, worker in [key for key in self._asks if key[0] == index]:
            ask, asker = self._asks.pop((part, worker)), self.members.get(worker)
            if asker is not None and asker.present and asker.entered:
                self._ask(asker, ask)
        self._answer_readers()
        self._show_followers([index])

    def fail(self, work: Work, error: ShoestringError) -> None:
        """Take back work that could not be computed."""
        members = self._contributors(work)
        if work.culprit is None:  # the part is lost: all who took part or come later must know
            self._failure = error
            for member in members:
                self.refuse(member.identity, error)
            return
        work.rounds.drop(work, [work.culprit])
        self._stirred.add(work.rounds.holding.part.index)
        for member in members:
            if member.worker == work.culprit:
                self.refuse(member.identity, error)
                self._depart(member)

    def saved(self, seq: int, record: bytes) -> None:
        """Note that this shard's file of a checkpoint is written."""
        self._records.add_own(seq, record)
        self._report_saved()

    def not_saved(self, seq: int, why: str) -> None:
        """Tell the workers that this shard's file of a checkpoint could not be written."""
        self._records.give_up(seq, why[:TEXT_LIMIT])
        for member in self._entered().values():
            self._send(member.identity, say.Snapped(seq, why[:TEXT_LIMIT]))

    def _report_saved(self) -> None:
        """Send the first worker, which completes checkpoints, the files this shard knows of."""
        takers = self._entered()
        if takers:
            first = takers[min(takers)]
            for seq, files in self._records.complete(takers):
                self._send(first.identity, say.Snapped(seq), memoryview(files))

    def _report_again(self, member: Member, seq: int) -> None:
        """Repeat what was reported of a checkpoint; silence means that a file is still being written."""
        report = self._records.reported(seq)
        if report is not None:
            files, why = report
            self._send(member.identity, say.Snapped(seq, why), memoryview(files))

    def tick(self, now: float) -> list[int]:
        """Take out workers whose lease ran out; return them."""
        gone = self.members.lapse(now)
        for member in gone:
            self._depart(member)
        return [member.worker for member in gone]

    def _depart(self, member: Member) -> None:
        member.present = False
        self.departed.append(member.worker)
        self._stirred.update(self.parts)
        self._asks = {key: ask for key, ask in self._asks.items() if key[1] != member.worker}
        self._readers.forget(member.worker)
        for index, rounds in self.parts.items():
            rounds.forget(member.worker)
            self._release(index)
        self._stirred.update(self._waiting.drop_orphans())  # what waits for workers that are gone
        self._report_saved()
        self._show_followers(self.parts)  # those who pushed further than it are the slowest now

    def _show_followers(self, indices: Iterable[int]) -> None:
        """Note that parts have come to another round, for followers if there are any."""
        if self._followers.known:
            self._followers.stir(indices)

    def _entered(self) -> dict[int, Member]:
        return {member.worker: member for member in self.members if member.present and member.entered}

    def _reply(self, index: int, member: Member, replies: Sequence[Reply], seq: int) -> None:
        if not replies:  # an earlier answer has brought it all
            empty = say.Delta(part=index, version=0, seq=seq, codec="", last=True)
            self._send(member.identity, empty)
        for place, reply in enumerate(replies, 1):
            common: dict[str, Any] = {
                "part": index,
                "version": reply.version,
                "seq": seq,
                "squares": reply.squares,
                "skip": reply.skip,
                "statistics": reply.statistics,
                "decisions": reply.decisions,
                "used": reply.used,
                "news": reply.news if member.worker else b"",
            }
            if not reply.is_full:
                delta = say.Delta(codec=reply.codec, last=place == len(replies), **common)
                self._send(member.identity, delta, reply.payload.data)
            elif reply.slot >= 0 and member.shares:
                self._send(member.identity, say.Full(slot=reply.slot, **common))
            else:
                self._send(member.identity, say.Full(**common), reply.payload.data)

    def _release(self, index: int) -> None:
        """Answer bounded pushes that need wait no longer."""
        present = self._entered()
        self.parts[index].settle(present)
        for worker, seq, replies in self.parts[index].release(present):
            self._reply(index, present[worker], replies, seq)

    def _answer_readers(self) -> None:
        if self._readers.waiting:
            self._readers.answer(self.parts, self.is_filled)

    def _scale(self, scale: say.Scale) -> None:
        if not 0.0 <= scale.scale <= 1.0:
            raise WireError(f"a scale of {scale.scale}", hint="check both sides' versions")
        self._waiting.scale(scale.seq, scale.scale)
        self._go_on(scale.seq)

    def _commit(self, member: Member, commit: say.Commit) -> None:
        if not member.entered:
            raise WireError("a commit from a worker that has not entered", hint="start the worker again")
        self._commits.add(member.worker, member.incarnation, commit)
        self._stirred.update(index for index, rounds in self.parts.items() if rounds.has_queue)
        self._go_on(commit.seq, member.worker)

    def _put(self, member: Member, put: say.Put, payload: memoryview) -> None:
        self._waiting.put(member, put, payload)
        self._go_on(put.seq)

    def _go_on(self, seq: int, worker: int = -1) -> None:
        """Go on with the sums of a round of which all is known now; `worker` has just committed to it."""
        self._decided += self._waiting.decide(seq, worker)

    def _contributors(self, work: Work) -> Sequence[Member]:
        lives = {item.worker: item.push.incarnation for item in work.contributions}
        return [m for m in self.members if m.present and lives.get(m.worker) == m.incarnation]

    def _send(self, identity: bytes, message: Message, payload: memoryview = _EMPTY) -> None:
        self.outbox.append((identity, message, payload))
