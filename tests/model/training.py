"""Training as a simulated worker does it: gradients drawn by chance, and the real protocol around them.

Its gradient depends on its parameters, so a replica that differs in one bit soon differs in many.
What the exchange's thread and the training thread do in a process is done here in turn: messages
go to the protocol, its answers are applied round by round, and the next round is pushed.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import msgspec
import numpy as np

from shoestring.checkpoint.tensorfile import FileRecord
from shoestring.codec.feedback import Feedback
from shoestring.codec.registry import make
from shoestring.errors import ShoestringError
from shoestring.model.parts import assign, cut, pack_flags
from shoestring.model.table import Table, precision_of
from shoestring.model.vectors import pack
from shoestring.wire import messages as say
from shoestring.wire.messages import WHOLE_ROUND, Message
from shoestring.worker.protocol.joining import Identity
from shoestring.worker.protocol.worker import Answer, Worker

EMPTY = memoryview(b"")
NEVER_S = 1e12  # silence is not what is tested: messages of a simulated worker may take for ever


@dataclass(frozen=True)
class Plan:
    """What all workers of a simulated run do."""

    table: Table
    workers: int = 2
    shards: int = 2
    rounds: int = 5
    codecs: tuple[str, ...] = ("float32",)  # of the rounds, in turn
    delay: int = 0
    bound: int = WHOLE_ROUND
    warmup: int = 0  # whole rounds before bounded ones
    skips: tuple[tuple[int, int, int], ...] = ()  # (worker, round, part) that hold NaN
    weighted: bool = False
    unused: bool = False
    early: bool = True  # pushes are made before the step is committed to
    carried: bool = True  # the commit goes with the last push
    counted: bool = False  # a launcher counts the processes that it starts
    saves: tuple[int, ...] = ()  # rounds with a checkpoint
    sets: tuple[int, ...] = ()  # rounds before which scripts set parameters and the optimizer's state
    followed: bool = False  # a program that is no worker reads versions
    looks: bool = False  # the first worker asks for the optimizer's state after every round

    @property
    def parts(self):
        return cut([tensor.shape for tensor in self.table.tensors])


def record_of(name: str) -> bytes:
    """What a writer says of a file of a checkpoint."""
    digest = "0" * 64
    return msgspec.json.encode(FileRecord(f"{name}.safetensors", 1, digest, [], {}))


def start_values(part) -> np.ndarray:
    return np.random.default_rng(part.index).standard_normal(part.size).astype(np.float32)


def set_values(part, seq: int) -> dict[str, np.ndarray]:
    """What scripts set a part to before a round."""
    rng = np.random.default_rng((part.index, seq))
    return {
        "params": rng.standard_normal(part.size).astype(np.float32),
        "steps": np.full(len(part.pieces), 10 * seq),
        "momentum": rng.standard_normal(part.size).astype(np.float32),
    }


@dataclass
class Training:
    """One life of one worker. `send(shard, message, payload)` is the network."""

    plan: Plan
    number: int
    life: int
    send: Callable[[int, Message, memoryview], None]
    now: float = 0.0
    stage: str = "join"  # then train, save, leave, done, refused
    answered: int = 0
    seq: int = 0
    acked: list[tuple[int, int, int]] = field(default_factory=list)  # (part, incarnation, seq)
    on_apply: Callable[[int, int, np.ndarray], None] = lambda part, version, values: None
    on_step: Callable[[int], None] = lambda seq: None
    on_state: Callable[[int, int, bytes], None] = lambda part, seq, payload: None
    asked: int = 0  # the last round whose state was asked for, and the last one that came
    looked: int = 0

    def __post_init__(self) -> None:
        plan = self.plan
        self.reports: dict[int, set[str]] = {}  # by round: the files that shards have reported to this worker
        self.parts = plan.parts
        self.homes = assign(self.parts, plan.shards)
        self.precisions = [precision_of(part, plan.table.tensors) for part in self.parts]
        self.params = [np.full(part.size, np.nan, np.float32) for part in self.parts]
        self.feedback = [Feedback(make("float32"), part.layout) for part in self.parts]
        self.protocol = Worker(
            Identity(
                "model",
                self.number,
                plan.workers,
                f"{self.number}.{self.life}",
                self.life if plan.counted else 0,
            ),
            memoryview(msgspec.msgpack.encode(plan.table)),
            self.homes,
            [part.size for part in self.parts],
            [f"shard {index}" for index in range(plan.shards)],
            initial=lambda part: start_values(self.parts[part]).view(np.uint8).data,
            clip_norm=plan.table.clip_norm,
            timeout_s=NEVER_S,
            join_timeout_s=NEVER_S,
            ask_after_s=5.0,
            now=self.now,
        )
        self._send_all()

    @property
    def is_over(self) -> bool:
        return self.stage in ("done", "refused")

    def tick(self, now: float) -> None:
        """Let time pass."""
        self.now = now
        if not self.is_over:
            self.protocol.tick(now)
            self._send_all()

    def take(self, shard: int, message: Message, payload: memoryview) -> None:
        """Receive one message."""
        if self.is_over:
            return
        try:
            self.protocol.handle(shard, message, payload, self.now)
        except ShoestringError:
            self.stage = "refused"
            return
        while self.protocol.heard:
            self.protocol.answers.add(self.protocol.heard.popleft())
        if self.stage == "join" and self.protocol.answers.apply(0, self._apply):
            assert self.protocol.has_joined
            self.stage = "train"
            self.first = self.protocol.joining.first_round
            self.answered = self.seq = self.first - 1
        self._go_on()
        while self.protocol.reports:
            report, files = self.protocol.reports.popleft()
            names = {record.name for record in msgspec.json.decode(files, type=list[FileRecord])}
            self.reports.setdefault(report.round, set()).update(names)
        if self.stage == "save" and not self.protocol._files:
            self.stage = "leave"
            self.protocol.leave(self.now)
        if self.stage == "leave" and self.protocol.has_left:
            self.stage = "done"
        self._send_all()

    def _send_all(self) -> None:
        while self.protocol.outbox:
            self.send(*self.protocol.outbox.popleft())

    def _go_on(self) -> None:
        """Take answers; push the next round when this step waits for no more; leave after the last."""
        while self.stage == "train":
            is_prompt = self.seq <= self.plan.warmup or self.seq >= self.plan.rounds
            if self.answered < self.seq - (0 if is_prompt else self.plan.delay):
                if not self.protocol.answers.apply(self.answered + 1, self._apply):
                    return
                self.answered += 1
                lives = self.protocol.joining.incarnations
                self.acked += [(p.index, lives[self.homes[p.index]], self.answered) for p in self.parts]
                continue
            if not self._has_looked():
                return
            if self.seq >= self.first:
                self.on_step(self.seq)
            if self.seq in self.plan.saves:
                self.protocol.record(self.seq, record_of(f"worker-{self.number}"), self.now)
                if self.number == 0:
                    self.protocol.expect_reports(self.seq, self.now)
            if self.seq >= self.plan.rounds:
                self.stage = "save"  # the end of a run waits for what was begun
                return
            self.seq += 1
            is_set = self.seq in self.plan.sets
            if is_set:
                self.params = [self._set_values(part, self.seq)["params"] for part in self.parts]
            changed = pack_flags(np.full(len(self.parts), is_set))
            commit = say.Commit(self.seq, self._is_skipped(), changed, is_set)
            for part in reversed(self.parts):
                self._push(part, commit if self.plan.carried and part is self.parts[0] else None)
            if self.plan.early and not self.plan.carried:
                self.protocol.commit(commit, partial(self._give, self.seq))

    def _has_looked(self) -> bool:
        """Ask for the state of the round that is over; say whether all of it is there."""
        if not self.plan.looks or self.number or self.seq < self.first or self.looked == self.seq:
            return True
        if self.asked != self.seq:
            self.asked = self.seq
            self.protocol.ask_state(self.seq, self.now)
        if not self.protocol.has_state:
            return False
        self.looked = self.seq
        for part, (message, payload) in self.protocol.states.items():
            self.on_state(part, message.round, payload)
        return True

    def _give(self, seq: int, index: int):
        vectors = self._set_values(self.parts[index], seq)
        return tuple(vectors), pack(vectors)

    def _set_values(self, part, seq: int) -> dict[str, np.ndarray]:
        vectors = set_values(part, seq)
        self.precisions[part.index].round(vectors["params"])
        return vectors

    def _is_skipped(self) -> bool:
        return any(plan[:2] == (self.number, self.seq) for plan in self.plan.skips)

    def _push(self, part, commit: say.Commit | None) -> None:
        plan, index, seq = self.plan, part.index, self.seq
        codec = make(plan.codecs[seq % len(plan.codecs)])
        noise = np.random.default_rng((self.number, seq, index)).standard_normal(part.size)
        gradient = (self.params[index] * np.float32(0.3) + noise).astype(np.float32)
        used = np.ones(len(part.pieces), bool)
        if plan.unused and (seq + self.number) % 2:
            used[0] = False
            gradient[: part.pieces[0].size] = 0
        skip = (self.number, seq, index) in plan.skips
        payload = EMPTY
        feedback = self.feedback[index]
        if not skip and codec.name == "float32":  # the values themselves, and the feedback
            payload = (gradient + feedback.kept).view(np.uint8).data
            feedback.reset()
        elif not skip:
            feedback.codec = codec
            payload = feedback.encode(gradient).data
        message = say.Push(
            part=index,
            seq=seq,
            weight=1.0 + self.number / 2 if plan.weighted else 1.0,
            codec=codec.spec,
            reply=codec.spec,
            reply_cost=1.0,
            hyper=[[0.125, 0.5, 0.0, 0.0]],
            used=b"" if used.all() else np.packbits(used).tobytes(),
            bound=WHOLE_ROUND if seq <= plan.warmup else plan.bound,
            skip=skip,
            early=plan.early,
            commit=commit if plan.early else None,
            save=seq in plan.saves,
        )
        self.protocol.push(message, payload, self.now, partial(self._give, seq))

    def _apply(self, answer: Answer) -> None:
        index, message = answer.part, answer.message
        if isinstance(message, say.Full):
            self.params[index] = self.precisions[index].unpack(answer.payload).copy()
        elif message.codec:
            layout = self.parts[index].layout
            make(message.codec).decode(answer.payload, layout, self.params[index], 1.0)
        self.precisions[index].round(self.params[index])
        self.on_apply(index, message.version, self.params[index])
