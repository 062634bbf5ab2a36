"""A worker as the protocol sees it: the rules of joining and exchanging, without torch, sockets or threads.

It asks about a push that has no answer, sends it again when it is missing, ignores second
answers and those that do not follow what it has, applies the answers of a round only after
those of the round before, and resends whatever its joining waits for. Its gradient depends
on its parameters, so a replica that differs in one bit soon differs in many.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import numpy as np

from shoestring.codec.feedback import Feedback
from shoestring.codec.registry import make
from shoestring.model.parts import assign, cut
from shoestring.model.table import Table
from shoestring.wire import messages as say
from shoestring.wire.messages import WHOLE_ROUND, Message

EMPTY = memoryview(b"")
ASK_S, BEAT_S, RETRY_S = 5.0, 1.0, 5.0


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

    @property
    def parts(self):
        return cut([tensor.shape for tensor in self.table.tensors])


def start_values(part) -> np.ndarray:
    return np.random.default_rng(part.index).standard_normal(part.size).astype(np.float32)


@dataclass
class Pushed:
    message: say.Push
    payload: memoryview
    asked_at: float
    pause_s: float = ASK_S


@dataclass
class Worker:
    """One life of one worker. `send(shard, message, payload)` is the network."""

    plan: Plan
    number: int
    incarnation: int
    send: Callable[[int, Message, memoryview], None]
    now: float = 0.0
    stage: str = "hello"  # then enter, fill, train, done, refused
    answered: int = 0
    seq: int = 0
    refusal: str = ""
    acked: list[tuple[int, int]] = field(default_factory=list)  # (part, seq)
    on_apply: Callable[[int, int, np.ndarray], None] = lambda part, version, values: None
    on_step: Callable[[int], None] = lambda seq: None

    def __post_init__(self) -> None:
        self.parts = self.plan.parts
        self.homes = assign(self.parts, self.plan.shards)
        self.params = [start_values(part) for part in self.parts]
        self.have = [0] * len(self.parts)
        self.feedback = [Feedback(make("float32"), part.layout) for part in self.parts]
        self.sent: dict[tuple[int, int], Pushed] = {}
        self.answers: dict[int, list[tuple[Message, memoryview]]] = {}
        self.waiting: dict[object, tuple[int, Message, memoryview]] = {}  # what joining waits for
        self.welcomes: dict[int, say.Welcome] = {}
        self.entered: dict[int, say.Entered] = {}
        self.norms: dict[int, dict[int, float]] = {}
        self.told: dict[int, float] = {}
        self.complete: set[int] = set()  # parts whose answers of this round are all there
        self.first = 0
        self._retry_at = self._beat_at = self.now
        table = memoryview(msgspec.msgpack.encode(self.plan.table))
        for shard in range(self.plan.shards):
            hello = say.Hello(
                say.PROTOCOL,
                "model",
                self.number,
                self.plan.workers,
                self.incarnation,
                shard,
                self.plan.shards,
            )
            self._request(("hello", shard), shard, hello, table)

    @property
    def is_over(self) -> bool:
        return self.stage in ("done", "refused")

    def tick(self, now: float) -> None:
        """Beat, and ask again for what did not come."""
        self.now = now
        if self.is_over:
            return
        if now - self._beat_at >= BEAT_S:
            self._beat_at = now
            for shard in range(self.plan.shards):
                if shard in self.welcomes:
                    self.send(shard, say.Beat(now), EMPTY)
        if now - self._retry_at >= RETRY_S:
            self._retry_at = now
            for shard, message, payload in list(self.waiting.values()):
                self.send(shard, message, payload)
        for (part, seq), pushed in self.sent.items():
            if now - pushed.asked_at > pushed.pause_s:
                pushed.asked_at, pushed.pause_s = now, min(2 * pushed.pause_s, 60.0)
                self.send(self.homes[part], say.Ask(part, seq, self.have[part]), EMPTY)

    def take(self, shard: int, message: Message, payload: memoryview) -> None:
        """Receive one message."""
        if self.is_over:
            return
        match message:
            case say.Refusal():
                self.stage, self.refusal = "refused", message.message
            case say.Welcome() if self.stage == "hello":
                self.welcomes[shard] = message
                if self._got(("hello", shard)):
                    self._enter(max(welcome.round for welcome in self.welcomes.values()) + 1)
            case say.Entered() if self.stage == "enter" and (
                message.round == self.first if message.agreed else message.round > self.first
            ):
                self.entered[shard] = message
                if self._got(("enter", shard)):
                    if all(answer.agreed for answer in self.entered.values()):
                        self._fill()
                    else:
                        self._enter(max(answer.round for answer in self.entered.values()))
            case say.Full(seq=0):
                if self.stage == "fill" and ("pull", message.part) in self.waiting:
                    self._apply(message, payload)
                    self.waiting.pop(("init", message.part), None)
                    if self._got(("pull", message.part)):
                        self._train()
            case say.Full() | say.Delta():
                self._answer(message, payload)
            case say.Norm():
                self._norm(shard, message.seq, message.part, message.squares)
            case say.Missing():
                pushed = self.sent.get((message.part, message.seq))
                if pushed is not None:
                    self.send(shard, pushed.message, pushed.payload)

    def _request(self, key: object, shard: int, message: Message, payload: memoryview = EMPTY) -> None:
        self.waiting[key] = (shard, message, payload)
        self.send(shard, message, payload)

    def _got(self, key: object) -> bool:
        """Strike something off; say whether this stage is complete."""
        was_there = self.waiting.pop(key, None) is not None
        return was_there and not self.waiting

    def _enter(self, first: int) -> None:
        self.stage, self.first, self.entered = "enter", first, {}
        for shard in range(self.plan.shards):
            self._request(("enter", shard), shard, say.Enter(first))

    def _fill(self) -> None:
        self.stage = "fill"
        for part in self.parts:
            shard = self.homes[part.index]
            if self.welcomes[shard].empty and self.number == 0:
                values = start_values(part).view(np.uint8).data
                self._request(("init", part.index), shard, say.Init(part.index), values)
            self._request(("pull", part.index), shard, say.Pull(part.index, self.first - 1))

    def _train(self) -> None:
        self.stage = "train"
        self.answered = self.seq = self.first - 1
        self._go_on()

    def _go_on(self) -> None:
        """Take answers; push the next round when this step waits for no more; leave after the last."""
        while self.stage == "train":
            is_prompt = self.seq <= self.plan.warmup or self.seq >= self.plan.rounds
            if self.answered < self.seq - (0 if is_prompt else self.plan.delay):
                if not self._collect():
                    return
                continue
            if self.seq >= self.first:
                self.on_step(self.seq)
            if self.seq >= self.plan.rounds:
                self.stage = "done"
                for shard in range(self.plan.shards):
                    self.send(shard, say.Leave(), EMPTY)
                return
            self.seq += 1
            for part in reversed(self.parts):
                self._push(part)

    def _push(self, part) -> None:
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
        if not skip and codec.name == "float32":  # the values themselves, and what was kept
            payload = (gradient + feedback.kept).view(np.uint8).data
            feedback.reset()
        elif not skip:
            feedback.codec = codec
            payload = feedback.encode(gradient).data
        message = say.Push(
            index,
            self.incarnation,
            seq,
            self.have[index],
            1.0 + self.number / 2 if plan.weighted else 1.0,
            codec.spec,
            codec.spec,
            1.0,
            [[0.125, 0.5, 0.0, 0.0]],
            b"" if used.all() else np.packbits(used).tobytes(),
            WHOLE_ROUND if seq <= plan.warmup else plan.bound,
            skip,
        )
        self.sent[index, seq] = Pushed(message, payload, self.now)
        self.send(self.homes[index], message, payload)

    def _answer(self, message: say.Full | say.Delta, payload: memoryview) -> None:
        index = message.part
        if (index, message.seq) not in self.sent:
            return
        taken = [m for seq, answers in self.answers.items() if seq <= message.seq for m, _ in answers]
        will_have = max([self.have[index], *(m.version for m in taken if m.part == index)])
        if isinstance(message, say.Delta) and message.version > will_have + 1:
            return  # something before it was lost: ask again
        if isinstance(message, say.Full) or message.last:
            del self.sent[message.part, message.seq]
        self._norm(self.homes[message.part], message.seq, message.part, message.squares)
        self.answers.setdefault(message.seq, []).append((message, payload))
        self._go_on()

    def _collect(self) -> bool:
        """Take the answers of the next round; say whether it is complete."""
        seq = self.answered + 1
        for message, payload in self.answers.pop(seq, []):
            self._apply(message, payload)
            if isinstance(message, say.Full) or message.last:
                self.complete.add(message.part)
                self.acked.append((message.part, seq))
        if len(self.complete) < len(self.parts):
            return False
        self.complete.clear()
        self.answered = seq
        return True

    def _apply(self, message: say.Full | say.Delta, payload: memoryview) -> None:
        index = message.part
        if message.version <= self.have[index] and message.seq:
            return
        if isinstance(message, say.Full):
            self.params[index] = np.frombuffer(payload, np.float32).copy()
        else:
            assert message.version == self.have[index] + 1, "a change of another version"
            if message.codec:
                layout = self.parts[index].layout
                make(message.codec).decode(payload, layout, self.params[index], 1.0)
        self.have[index] = message.version
        self.on_apply(index, message.version, self.params[index])

    def _norm(self, shard: int, seq: int, part: int, squares: float) -> None:
        if not self.plan.table.clip_norm:
            return
        norms = self.norms.setdefault(seq, {})
        norms.setdefault(part, squares)
        if seq in self.told:  # the scale was lost on its way
            self.send(shard, say.Scale(seq, self.told[seq]), EMPTY)
        elif len(norms) == len(self.parts):
            norm = math.sqrt(sum(norms[index] for index in range(len(norms))))
            self.told[seq] = min(1.0, self.plan.table.clip_norm / (norm + 1e-6))
            for other in range(self.plan.shards):
                self.send(other, say.Scale(seq, self.told[seq]), EMPTY)
