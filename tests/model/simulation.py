"""Shards and workers joined by a network that loses, repeats, delays, reorders and resets.

Everything is drawn from one seed. Both sides are the real ones; only the values they exchange are
made up. Without `late` messages keep their order within one life of a connection, as with TCP; a
reset loses what was under way in both directions. Updates are computed some time after they began,
and either half may see the messages in between. Messages cross as bytes, so whatever is said can
be encoded and decoded.
"""

from collections import Counter, deque
from dataclasses import dataclass
from random import Random

import numpy as np

from shoestring.server.followers import ASKS
from shoestring.server.rounds import AHEAD, LOG_LIMIT
from shoestring.server.shard import Shard
from shoestring.server.work import Work
from shoestring.wire import frames
from shoestring.wire import messages as say
from tests.model.reading import Reading, parts_of
from tests.model.training import Plan, Training, record_of

EVENTS = 60_000  # a run that needs more is stuck
FOLLOWER = b"follower.1.0"


@dataclass(frozen=True)
class Faults:
    """How often what happens, as shares of all messages or events."""

    drop: float = 0.0
    repeat: float = 0.0
    late: float = 0.0  # messages that others of their connection overtake
    reset: float = 0.0
    hurry: float = (
        0.0  # the clock moves on while messages are under way; much more is more than a line can carry
    )
    kill: float = 0.0
    kills: int = 0
    slow: int = -1  # a worker whose messages seldom get through
    lease_s: float = 1e9


class StuckError(AssertionError):
    """Workers wait for what will not come."""


class Simulation:
    def __init__(self, plan: Plan, faults: Faults = Faults(), seed: int = 0) -> None:  # noqa: B008
        self.plan, self.faults = plan, faults
        self.random = Random(seed)
        self.now = 0.0
        self.shards = [
            Shard(index, plan.shards, "model", lease_s=faults.lease_s) for index in range(plan.shards)
        ]
        self.works: list[tuple[Shard, Work, bool]] = []
        self.lines: dict[tuple[bytes, int, bool], deque] = {}  # (identity, shard, upwards)
        self.workers: dict[bytes, Training] = {}
        self.lives = Counter()
        self.kills_left = faults.kills
        self.applied: list[tuple[int, int, int, int]] = []  # (part, worker, incarnation, seq)
        self.acked: set[tuple[int, int, int, int]] = set()
        self.truth: dict[tuple[int, int], bytes] = {}  # (part, version): the values
        self.states: dict[tuple[int, int], bytes] = {}  # (part, round): the optimizer's state
        self.saved: dict[tuple[int, int], set[int]] = {}  # by shard and round: the parts in its file
        self.lead = 0  # the most pushes that a worker that goes on is ahead of the slowest
        self.refusals: list[str] = []
        self.after: dict[tuple[int, int], bytes] = {}  # (part, round): the values
        for number in range(plan.workers):
            self._start(number)
        self.reading = self._start_reading() if plan.followed else None

    def run(self) -> "Simulation":
        for event in range(EVENTS):
            if all(worker.is_over for worker in self.workers.values()) and not self.works:
                self._deliver_all()
                self._check_log()
                return self
            self._event()
            if event % 8 == 0:
                self._check_memory()
        states = {name: (w.stage, w.seq, w.answered) for name, w in self.workers.items()}
        rounds = [{i: (d.round, d.busy) for i, d in shard.parts.items()} for shard in self.shards]
        raise StuckError(f"{states} {rounds}")

    def params(self) -> list[bytes]:
        parts = {index: rounds for shard in self.shards for index, rounds in shard.parts.items()}
        return [parts[index].holding.values.tobytes() for index in sorted(parts)]

    def all_rounds(self):
        return [rounds for shard in self.shards for rounds in shard.parts.values()]

    def _start(self, number: int) -> None:
        self.lives[number] += 1
        identity = b"%d.%d" % (number, self.lives[number])
        for shard in range(self.plan.shards):
            self.lines[identity, shard, True] = deque()
            self.lines[identity, shard, False] = deque()

        def send(shard, message, payload):
            self._put(self.lines[identity, shard, True], frames.encode(message, payload))

        worker = Training(self.plan, number, self.lives[number], send, self.now)
        worker.on_apply = self._check_values
        worker.on_state = self._check_state
        worker.on_step = lambda seq: self._measure_lead(worker, seq)
        self.workers[identity] = worker

    def _start_reading(self) -> Reading:
        for shard in range(self.plan.shards):
            self.lines[FOLLOWER, shard, True] = deque()
            self.lines[FOLLOWER, shard, False] = deque()

        def send(shard, message, payload):
            self._put(self.lines[FOLLOWER, shard, True], frames.encode(message, payload))

        return Reading(self.plan.shards, self.random, send, self.now)

    def read_last(self) -> None:
        """After a run: let the follower get the last round over lines that lose nothing any more."""
        self.faults = Faults()
        reading, last = self.reading, max(rounds.round for rounds in self.all_rounds())
        for _ in range(EVENTS):
            if reading.tracker.given >= last:
                return
            if not any(self.lines.values()):
                reading.want(self.now)
                for _ in range(10):
                    self._pass_time()
            self._deliver_all()
        raise StuckError(f"the follower has {reading.tracker.given} of {last}")

    def check_seen(self) -> None:
        """Each version that the follower was given is that of one round, bit for bit."""
        for version in self.reading.seen:
            assert version.is_whole
            for index, found in enumerate(parts_of(version, self.plan.parts)):
                at = max(seq for part, seq in self.after if part == index and seq <= version.round)
                assert found == self.after[index, at], f"part {index} after round {version.round}"

    def _put(self, line: deque, encoded) -> None:
        if self.random.random() < self.faults.drop:
            return
        if self.random.random() < self.faults.late:
            line.insert(self.random.randint(0, len(line)), encoded)
        else:
            line.append(encoded)
        if self.random.random() < self.faults.repeat:
            line.append(encoded)

    def _event(self) -> None:
        draw = self.random.random
        if self.kills_left and draw() < self.faults.kill:
            self._kill()
        full = [key for key, line in self.lines.items() if line]
        if self.faults.slow >= 0 and draw() < 0.95:
            slow = b"%d." % self.faults.slow
            full = [key for key in full if not key[0].startswith(slow)] or full
        if draw() < self.faults.reset and full:
            identity, shard, _ = self.random.choice(full)
            for is_upwards in (True, False):
                self.lines.get((identity, shard, is_upwards), deque()).clear()
            return
        self._begin_work()
        if self.works and (not full or draw() < 0.3):
            self._end_work(self.random.randrange(len(self.works)))
        elif full:
            self._deliver(self.random.choice(full))
        if (not full and not self.works) or draw() < self.faults.hurry:
            self._pass_time()

    def _deliver(self, key) -> None:
        identity, index, is_upwards = key
        message, payload = frames.decode(self.lines[key].popleft())
        if is_upwards:
            self.shards[index].handle(identity, message, payload, self.now)
            if isinstance(message, say.Init) and message.part in self.shards[index].is_filled:
                first = self.shards[index].parts[message.part].holding.values.tobytes()
                self.after.setdefault((message.part, 0), first)
            self._post(index)
            return
        if identity == FOLLOWER:
            self.reading.take(index, message, payload, self.now)
            return
        worker = self.workers.get(identity)
        if worker is None:
            return
        was_over = worker.is_over
        worker.take(index, message, payload)
        if worker.stage == "refused" and not was_over:
            self.refusals.append(getattr(message, "message", repr(message)))
        self.acked |= {(part, worker.number, life, seq) for part, life, seq in worker.acked}
        worker.acked.clear()
        if worker.stage == "refused" and self.faults.kills:
            self._restart(identity)

    def _deliver_all(self) -> None:
        while full := [key for key, line in self.lines.items() if line]:
            self._deliver(full[0])
            self._begin_work()
            while self.works:
                self._end_work(0)

    def _post(self, index: int) -> None:
        outbox = self.shards[index].outbox
        while outbox:
            identity, message, payload = outbox.popleft()
            line = self.lines.get((identity, index, False))
            if line is not None:
                self._put(line, frames.encode(message, payload))

    def _begin_work(self) -> None:
        for shard in self.shards:
            if self.random.random() < 0.5:
                shard.show_next()
            while (work := shard.next_work()) is not None:
                is_run = self.random.random() < 0.5
                if is_run:
                    work.run()
                self.works.append((shard, work, is_run))
            self._post(shard.index)

    def _end_work(self, place: int) -> None:
        shard, work, is_run = self.works.pop(place)
        if not is_run:
            work.run()
        if work.reply is not None:
            part = work.rounds.holding.part.index
            for item in work.contributions:
                self.applied.append((part, item.worker, item.push.incarnation, work.seq))
            self.truth[part, work.reply.version] = work.rounds.holding.values.tobytes()
            self.after[part, work.seq] = self.truth[part, work.reply.version]
            self.states[part, work.seq] = bytes(work.rounds.holding.optimizer_state())
        shard.finish(work)
        if work.reply is not None and work.is_saved:
            self._save(shard, work)
        self._post(shard.index)

    def _save(self, shard: Shard, work: Work) -> None:
        """Write a shard's file of a checkpoint, which takes until all its parts are there."""
        parts = self.saved.setdefault((shard.index, work.seq), set())
        parts.add(work.rounds.holding.part.index)
        if parts == set(shard.parts):
            shard.saved(work.seq, record_of(f"shard-{shard.index}"))

    def _pass_time(self) -> None:
        self.now += 1.0
        for shard in self.shards:
            shard.tick(self.now)
            self._post(shard.index)
        for worker in list(self.workers.values()):
            worker.tick(self.now)
        if self.reading is not None:
            self.reading.tick(self.now)

    def _kill(self) -> None:
        alive = [name for name, worker in self.workers.items() if not worker.is_over]
        if alive:
            self.kills_left -= 1
            self._restart(self.random.choice(alive))

    def _restart(self, identity: bytes) -> None:
        """End a process; some of what it sent may still arrive. Start the next."""
        number = self.workers.pop(identity).number
        for shard in range(self.plan.shards):
            line = self.lines[identity, shard, True]
            while line and self.random.random() < 0.5:
                line.pop()
            del self.lines[identity, shard, False]
        self._start(number)

    def _measure_lead(self, worker: Training, seq: int) -> None:
        """Called when a step is over, before the next begins."""
        others = [w.number for w in self.workers.values() if w.stage == "train"]
        for rounds in self.all_rounds():
            slowest = min(rounds.ledger.seq(number) for number in others)
            self.lead = max(self.lead, seq - slowest)

    def _check_values(self, part: int, version: int, values: np.ndarray) -> None:
        if version:
            assert values.tobytes() == self.truth[part, version], f"part {part} at version {version}"

    def _check_state(self, part: int, seq: int, payload: bytes) -> None:
        assert payload == self.states[part, seq], f"state of part {part} after round {seq}"

    def _check_log(self) -> None:
        twice = [name for name, count in Counter(self.applied).items() if count > 1]
        assert twice == [], "applied twice"
        lost = self.acked - set(self.applied)
        assert lost == set(), "acknowledged and not applied"

    def _check_memory(self) -> None:
        for rounds in self.all_rounds():
            size = sum(entry.payload.nbytes for entry in rounds._log)
            assert len(rounds._log) <= LOG_LIMIT
            assert len(rounds._log) <= AHEAD or size <= rounds.holding.params.nbytes + (1 << 16)
            assert len(rounds._open) <= AHEAD
            assert len(rounds._queue) + len(rounds._held) <= AHEAD * self.plan.workers
            assert all(len(given) <= AHEAD + 1 for given in rounds._given.values())
        for shard in self.shards:
            most = self.plan.workers * max(1, len(shard.parts))
            assert len(shard._readers.waiting) <= 2 * most
            assert len(shard._asks) <= most
            assert len(shard._followers.known) <= 1
            assert all(len(one.asks) <= ASKS for one in shard._followers.known.values())
