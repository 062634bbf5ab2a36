"""One worker's side of the protocol: joining, pushes, norms, checkpoints and leaving.

`handle` takes one message of a shard, `tick` lets time pass; both leave messages to shards in
`outbox` and answers for the training thread in `heard`. The caller owns time, threads and sockets,
so that a test can drive any number of workers through any fault, step by step.

Every message that waits for an answer is sent again until it has one. A push without an answer is
asked about, and the commit of its round said again; a shard that does not hold the push gets it again,
under the same name. An answer that does
not follow what came before it is not taken, and asked for again.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shoestring.errors import JoinError, LinkError, ShoestringError, StaleWorkerError, WireError
from shoestring.model.vectors import PARAMS
from shoestring.wire import messages as say
from shoestring.wire.messages import Delta, Full, Message, Push
from shoestring.worker.protocol.joining import Identity, Joining, Memory, Outgoing, Stage
from shoestring.worker.protocol.norms import Norms
from shoestring.worker.protocol.requests import EMPTY, Request, Requests

BEAT_S = 1.0
_LEAVE_PAUSE_S = 1.0
_NOTICE_S = 5.0  # of waiting before a word is said
_SLOWEST_BYTES_S = 125_000 / 2  # 1 Mbit/s, there and back: a beat waits behind what was sent before it
_ROUNDS = 3  # whose answers may be under way, and the one before them
_REPORTS = 4  # rounds whose reports of checkpoints are waited for at once


# What the script has set of a part, for a `Put`: the names of vectors and the payload.
Give = Callable[[int], tuple[tuple[str, ...], memoryview]]


def nothing(part: int) -> tuple[tuple[str, ...], memoryview]:
    """The `Give` of a round before which the script has set nothing."""
    return (), EMPTY


@dataclass(frozen=True)
class Answer:
    """What a shard says of one part, in answer to a push or a pull."""

    message: Full | Delta
    payload: memoryview

    @property
    def part(self) -> int:
        return self.message.part

    @property
    def is_last(self) -> bool:
        """Whether the part is up to date when this has been applied."""
        return isinstance(self.message, Full) or self.message.last


class Answers:
    """Puts answers in order: round by round, and each version of a part once.

    Used by the thread that changes parameters; the protocol reads `have` from its own.
    Round 0 is joining, whose answers are whole parts.
    """

    def __init__(self, parts: int) -> None:
        self.have = [-1] * parts  # the version of each part that this worker holds
        self._waiting: dict[int, list[Answer]] = {}  # by round
        self._complete: set[int] = set()  # parts whose answers of the present round were all applied

    def add(self, answer: Answer) -> None:
        """Take note of an answer that has come in."""
        self._waiting.setdefault(answer.message.seq, []).append(answer)

    def apply(self, seq: int, change: Callable[[Answer], None]) -> bool:
        """Apply what has come in for round `seq`, after all rounds before it; say whether it is whole."""
        for answer in self._waiting.pop(seq, ()):
            part, version = answer.part, answer.message.version
            if version > self.have[part]:
                if isinstance(answer.message, Delta) and version != self.have[part] + 1:
                    raise WireError(
                        f"part {part} came at version {version}, this worker holds {self.have[part]}",
                        hint="please report this with the event log",
                    )
                change(answer)
                self.have[part] = version
            if answer.is_last:
                self._complete.add(part)
        if len(self._complete) < len(self.have):
            return False
        self._complete.clear()
        return True


class Worker:
    """One worker among the shards of a run. Not thread-safe, but for `answers`, as said there."""

    def __init__(
        self,
        who: Identity,
        table: memoryview,
        homes: Sequence[int],
        sizes: Sequence[int],
        addresses: Sequence[str],
        *,
        initial: Callable[[int], memoryview],
        names: tuple[str, ...] = (PARAMS,),
        memory: Memory | None = None,
        clip_norm: float = 0.0,
        timeout_s: float,
        join_timeout_s: float,
        ask_after_s: float,
        now: float,
    ) -> None:
        self.outbox: deque[Outgoing] = deque()
        self.heard: deque[Answer] = deque()
        self.reports: deque[tuple[say.Snapped, bytes]] = deque()
        self.notices: deque[str] = deque()
        self.answers = Answers(len(homes))
        self.joining = Joining(
            who,
            table,
            homes,
            len(addresses),
            self.outbox,
            initial=initial,
            names=names,
            memory=memory,
            now=now,
        )
        self._number = who.worker
        self._homes = tuple(homes)
        self.holders = frozenset(homes)  # the shards with parts: nothing is waited for from others
        self._addresses = tuple(addresses)
        self._timeout_s = timeout_s
        self._join_timeout_s = join_timeout_s
        self._ask_after_s = ask_after_s
        self._loads = [0] * len(addresses)  # bytes of parameters on each shard
        for home, size in zip(homes, sizes, strict=True):
            self._loads[home] += 4 * size
        self._heard_at = [now] * len(addresses)
        self._beat_at = now - BEAT_S
        self._noticed: set[tuple[int, Stage]] = set()
        # The version that each part will have once the answers of a round are applied, for the last rounds.
        self._accepted = [{0: 0} for _ in homes]
        self._pushes: dict[tuple[int, int], Request] = {}  # by part and round, until they are answered
        self._unanswered: Counter[int] = Counter()  # pushes by round
        self._commits: dict[int, tuple[say.Commit, Give]] = {}  # by round, until all its pushes are answered
        self.states: dict[int, tuple[say.State, bytes]] = {}  # the optimizer's, by part, as asked for last
        self._state_asks = Requests()
        self._state_round = -1
        self._echoed_at = [float("-inf")] * len(addresses)  # when the last beat was sent that came back
        self._norms = Norms(clip_norm, len(homes)) if clip_norm else None
        self._files = Requests()  # what is said and asked about checkpoints
        self._reported: dict[int, set[int]] = {}  # by round: the shards whose reports came
        self._leaving = Requests()
        self._is_leaving = False

    @property
    def has_joined(self) -> bool:
        return self.joining.stage is Stage.DONE

    @property
    def has_left(self) -> bool:
        """Whether every shard knows that this worker has left."""
        return self._is_leaving and not self._leaving

    def push(self, message: Push, payload: memoryview, now: float, give: Give = nothing) -> None:
        """Send the push of one part, for this worker itself; the last of a round may carry its commit."""
        home = self._homes[message.part]
        message.worker = message.sender = self._number
        message.incarnation = self.joining.incarnations[home]
        message.have = self.answers.have[message.part]
        self._pushes[message.part, message.seq] = Request(home, message, payload, now, self._ask_after_s)
        self._unanswered[message.seq] += 1
        self.outbox.append((home, message, payload))
        if message.commit is not None:
            self.commit(message.commit, give, told=home)

    def commit(self, commit: say.Commit, give: Give = nothing, *, told: int = -1) -> None:
        """Say that all pushes of a round are made, or that the round is to be skipped.

        `give` gives what the script has set of a part, until the round is answered; `told` is a shard that
        has heard it.
        """
        self._commits[commit.seq] = commit, give
        self.outbox.extend((shard, commit, EMPTY) for shard in sorted(self.holders - {told}))

    def slots(self, part: int) -> set[int]:
        """The slots of shared memory that pushes of a part still need."""
        pushes = [push.message for (index, _), push in self._pushes.items() if index == part]
        return {message.slot for message in pushes if isinstance(message, Push)}

    @property
    def has_state(self) -> bool:
        """Whether the optimizer's state of all parts has come in that was asked for."""
        return not self._state_asks

    def ask_state(self, seq: int, now: float) -> None:
        """Ask for the optimizer's state of all parts as it is after round `seq`."""
        self.states = {}
        self._state_round = seq
        for part, home in enumerate(self._homes):
            request = Request(home, say.AskState(part, seq), EMPTY, now)
            self._state_asks.add(("state", part), request)
            self.outbox.append((home, request.message, EMPTY))

    def record(self, seq: int, record: bytes, now: float) -> None:
        """Tell the first shard of a file of a checkpoint that this worker has written."""
        request = Request(0, say.Saved(seq), memoryview(record), now)
        self._files.add(("saved", seq), request)
        self.outbox.append((0, request.message, request.payload))

    def expect_reports(self, seq: int, now: float) -> None:
        """Ask the shards that hold parts for their reports of a checkpoint, unless they come unasked."""
        for shard in self.holders - self._reported.setdefault(seq, set()):
            self._files.add(("snapped", shard, seq), Request(shard, say.AskSnapped(seq), EMPTY, now))
        self._forget_reports()

    def leave(self, now: float, moved: str = "") -> None:
        """Say goodbye; `has_left` tells when all shards know that had let this worker in.

        `moved`: it goes on with this policy.
        """
        if self._is_leaving:
            return
        self._is_leaving = True
        for shard in range(len(self._addresses)):
            if self.joining.is_known(shard):
                request = Request(shard, say.Leave(moved), EMPTY, now, _LEAVE_PAUSE_S)
                self._leaving.add(shard, request)
                self.outbox.append((shard, request.message, EMPTY))
            elif shard not in self.holders:  # it may have heard the hello
                self.outbox.append((shard, say.Leave(), EMPTY))

    def handle(self, shard: int, message: Message, payload: memoryview, now: float) -> None:
        """Take one message of a shard; a refusal is raised."""
        self._heard_at[shard] = now
        if self._is_leaving and isinstance(message, say.Left | say.Refusal):
            self._leaving.answered(shard)
            return
        match message:
            case say.Full() | say.Delta() if message.seq:
                self._answer(message, payload)
            case say.Norm():
                self._norm(shard, message)
            case say.Missing() if message.seq:
                request = self._pushes.get((message.part, message.seq))
                if request is not None:
                    self.outbox.append((shard, request.message, request.payload))
            case say.Wanted():
                self._give(shard, message)
            case say.State():
                is_asked = message.round == self._state_round  # else an earlier question's answer
                if is_asked and self._state_asks.answered(("state", message.part)):
                    self.states[message.part] = message, bytes(payload)
            case say.Beat() if self.has_joined:
                self._echoed_at[shard] = max(self._echoed_at[shard], message.at)
            case say.Snapped():
                self._snapped(shard, message, payload)
            case say.Recorded():
                self._files.answered(("saved", message.round))
            case say.Refusal():
                self._refused(shard, message)
            case say.Welcome() | say.Entered() if shard not in self.holders:
                self.joining.take_idle(shard, message, now)
            case say.Full() | say.Missing() | say.Welcome() | say.Entered() | say.Beat():
                is_part = not self.has_joined and self.joining.take(shard, message, now)
                if is_part and isinstance(message, Full):
                    self._accepted[message.part][0] = message.version
                    self.heard.append(Answer(message, payload))
            case say.Left():
                pass  # late
            case _:
                raise WireError(f"a worker does not take `{type(message).__name__}`", hint="check versions")

    def tick(self, now: float) -> None:
        """Beat, ask again what has no answer, and raise if a shard is silent for too long."""
        is_beat = now - self._beat_at >= BEAT_S
        for shard in range(len(self._addresses)):
            if not self._is_leaving and shard in self.holders:
                self._check_silence(shard, now)
            if is_beat and self.joining.is_known(shard):
                self.outbox.append((shard, say.Beat(now), EMPTY))
        if is_beat:
            self._beat_at = now
        if self._is_leaving:
            self._repeat(self._leaving, now)
            return
        if not self.has_joined:
            self._check_joining(now)
            self.joining.tick(now)
            return
        self.joining.tick_idle(now)
        for (part, seq), push in self._pushes.items():
            if push.is_due(now):
                if seq in self._commits:
                    self.outbox.append((push.shard, self._commits[seq][0], EMPTY))
                self.outbox.append((push.shard, say.Ask(part, seq, self.answers.have[part]), EMPTY))
        self._repeat(self._files, now)
        self._repeat(self._state_asks, now, self._may_be_lost)

    def _may_be_lost(self, request: Request) -> bool:
        """Whether an answer is not merely still on its way: as in `Joining`."""
        return self._echoed_at[request.shard] > request.asked_at

    def _repeat(
        self, requests: Requests, now: float, may_ask: Callable[[Request], bool] = lambda request: True
    ) -> None:
        for request in requests.due(now, may_ask):
            self.outbox.append((request.shard, request.message, request.payload))

    def _answer(self, message: Full | Delta, payload: memoryview) -> None:
        key = (message.part, message.seq)
        if key not in self._pushes or not self._follows(message):
            return  # a second answer to one push, or one before it was lost: it is asked for again
        answer = Answer(message, payload)
        if answer.is_last:
            del self._pushes[key]
            self._unanswered[message.seq] -= 1
            if not self._unanswered[message.seq]:
                del self._unanswered[message.seq]
                self._commits.pop(message.seq, None)
        if self._norms is not None and not self._norms.knows(message.seq, message.part):
            self._norm(self._homes[message.part], say.Norm(message.part, message.seq, message.squares))
        self.heard.append(answer)

    def _follows(self, message: Full | Delta) -> bool:
        """Say whether an answer can be applied after those of its round and of the rounds before it.

        Later rounds do not count: their answers may have come first, and are applied after this one.
        """
        versions = self._accepted[message.part]
        before = max(version for seq, version in versions.items() if seq <= message.seq)
        if isinstance(message, Delta) and message.version > before + 1:
            return False
        versions[message.seq] = max(before, message.version)
        for seq in sorted(versions)[:-_ROUNDS]:
            del versions[seq]
        return True

    def _norm(self, shard: int, message: say.Norm) -> None:
        """Note a part's norm; once all are known, tell all shards the scale, later those that ask again."""
        if self._norms is None:
            return
        is_repeat = self._norms.knows(message.seq, message.part)
        scale = self._norms.add(message.seq, message.part, message.squares)
        if scale is not None:
            takers = [shard] if is_repeat else sorted(self.holders)
            self.outbox.extend((taker, scale, EMPTY) for taker in takers)

    def _give(self, shard: int, message: say.Wanted) -> None:
        """Send what the script has set of a part before a round that is not answered yet."""
        if message.seq in self._commits and (message.part, message.seq) in self._pushes:
            names, payload = self._commits[message.seq][1](message.part)
            self.outbox.append((shard, say.Put(message.part, message.seq, names), payload))

    def _snapped(self, shard: int, message: say.Snapped, payload: memoryview) -> None:
        self._files.answered(("snapped", shard, message.round))
        reported = self._reported.setdefault(message.round, set())
        if shard not in reported:
            reported.add(shard)
            self.reports.append((message, bytes(payload)))
        self._forget_reports()

    def _forget_reports(self) -> None:
        """Give up the oldest checkpoints: that of a round may never be complete."""
        for seq in sorted(self._reported)[:-_REPORTS]:
            del self._reported[seq]
            for shard in range(len(self._addresses)):
                self._files.answered(("snapped", shard, seq))

    def _refused(self, shard: int, refusal: say.Refusal) -> None:
        kind = StaleWorkerError if refusal.stale else ShoestringError if self.has_joined else JoinError
        raise kind(f"shard {shard} refused: {refusal.message}", hint=refusal.hint)

    def _check_silence(self, shard: int, now: float) -> None:
        silent_s = now - self._heard_at[shard]
        if silent_s <= self._timeout_s:
            return
        if self.has_joined:
            queued = sum(push.payload.nbytes for push in self._pushes.values() if push.shard == shard)
        else:
            queued = 2 * self._loads[shard] if self.joining.is_known(shard) else 0
        if silent_s <= self._timeout_s + queued / _SLOWEST_BYTES_S:
            return
        raise LinkError(
            f"shard {shard} at `{self._addresses[shard]}` did not answer for {self._timeout_s:g} s",
            hint="check that it runs (`shoestring serve`), that the address is right, that no firewall "
            "is between, and, with keys, that this worker's public key is on its allow-list",
        )

    def _check_joining(self, now: float) -> None:
        """Say what is waited for; raise if the other workers take too long."""
        waited_s, stage = now - self.joining.stage_at, self.joining.stage
        if waited_s <= _NOTICE_S:
            return
        awaits_others = stage is Stage.PULL
        limit_s = self._join_timeout_s if awaits_others else self._timeout_s
        for shard in self.joining.missing():
            address = self._addresses[shard]
            if (shard, stage) not in self._noticed:
                self._noticed.add((shard, stage))
                whom = "other workers at " if awaits_others else ""
                self.notices.append(f"waiting for {whom}shard {shard} ({address}), up to {limit_s:g} s")
            if waited_s > limit_s + 2 * self._loads[shard] / _SLOWEST_BYTES_S and awaits_others:
                raise JoinError(
                    f"shard {shard} at `{address}` had no parameters to give for {limit_s:g} s",
                    hint="check that the first worker runs and that all workers could join",
                )
