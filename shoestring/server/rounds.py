"""The rounds of one part: pushes come in, replies go out, each push counts once.

A pure state machine: no sockets, no clock, no threads. `push` takes a contribution in;
when a round is complete `next_work` gives `Work`, which may run on any thread while further
pushes are taken in; `finish` then records it and gives the replies. While there is work,
the holding belongs to it, once its update is decided: then nothing else reads its values or its version.

Contributions are kept compressed until their round is complete and are then summed (`work.py`).

What is kept is bounded: of each worker the pushes of `AHEAD` rounds, and of past replies
no more bytes than the part itself has, or `AHEAD` of them.
"""

import contextlib
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field, replace

import numpy as np

from shoestring.codec.base import Vector
from shoestring.errors import JoinError, WireError
from shoestring.model.layers import CHANNEL_LIMIT
from shoestring.model.parts import Part, layers_of
from shoestring.model.table import Table, precision_of
from shoestring.server.holding import Holding, Reply
from shoestring.server.ledger import PushLedger, Verdict
from shoestring.server.masters import MasterHolding
from shoestring.server.means import MeanHolding
from shoestring.server.members import Members
from shoestring.server.work import Commits, Contribution, Work
from shoestring.wire.messages import WHOLE_ROUND, Commit, Push

AHEAD = 2  # rounds a worker may push before the part has finished them
_SPARES = 8  # sums whose memory is kept
LOG_LIMIT = 256  # past replies, however small


def holding_of(part: Part, table: Table) -> Holding:
    """Make what holds a part's values: by the rule, and by what workers keep them in."""
    layers = layers_of(part, table.layers)
    if sum(1 + layer.channels for layer in layers) > CHANNEL_LIMIT:
        raise JoinError(
            f"part {part.index} has layers of more than {CHANNEL_LIMIT} channels",
            hint="share the statistics of fewer layers",
        )
    groups = [table.tensors[piece.tensor].group for piece in part.pieces]
    precision = precision_of(part, table.tensors)
    if table.rule.kind == "mean":
        holding: Holding = MeanHolding(part, table.rule, groups, layers)
    elif table.rule.moves_parameters and precision.is_narrow:
        holding = MasterHolding(part, table.rule, groups, layers, precision=precision)
    else:
        holding = Holding(part, table.rule, groups, layers)
    holding.names = [table.tensors[piece.tensor].name for piece in part.pieces]
    return holding


@dataclass
class PartRounds:
    """Takes the pushes of one part."""

    holding: Holding
    ledger: PushLedger
    clip: bool = False
    commits: Commits = field(default_factory=Commits)  # the shard's
    round: int = 0  # the last that all who take part have finished
    work: Work | None = None  # being computed, or waiting for commits or its scale
    spares: list[Vector] = field(default_factory=list)  # memory for sums, shared with the shard's other parts
    _open: dict[int, dict[int, Contribution]] = field(default_factory=dict)  # whole rounds
    _queue: deque[Contribution] = field(default_factory=deque)  # pushes that wait for nobody
    _held: list[Contribution] = field(default_factory=list)  # applied, the answer waits for slower workers
    _log: deque[Reply] = field(default_factory=deque)
    _have: dict[int, int] = field(default_factory=dict)  # the version each worker is known to hold
    _given: dict[int, dict[int, int]] = field(default_factory=dict)  # the version each answer led to

    def __post_init__(self) -> None:
        self.version = self.holding.version  # of the part as finished work left it
        self._last_whole = self.round
        self._is_whole = True  # so was the last push that was applied
        self._full: Reply | None = None
        self._state: memoryview | None = None

    def free_slot(self) -> int:
        """A slot of shared memory that no reply still needs; -1 where there is none. Any thread may ask."""
        taken = {entry.slot for entry in list(self._log)}
        return next((slot for slot in range(len(self.holding.slots)) if slot not in taken), -1)

    def lend(self, size: int) -> Vector:
        """Memory for a sum of so many values, contents undefined. Any thread may ask."""
        with contextlib.suppress(IndexError):
            spare = self.spares.pop()
            if spare.size >= size:
                return spare[:size]
        return np.empty(size, np.float32)

    def take_back(self, memory: Vector) -> None:
        """Keep memory for the next sum, which then does not wait for fresh pages."""
        if len(self.spares) < _SPARES:
            self.spares.append(memory if memory.base is None else memory.base)

    @property
    def busy(self) -> bool:
        return self.work is not None

    @property
    def is_updating(self) -> bool:
        """Whether the values may be changing in another thread."""
        return self.work is not None and self.work.skip is not None

    @property
    def is_whole(self) -> bool:
        """Whether the values are those of a round: whether the last update summed all workers' pushes."""
        return self._is_whole

    @property
    def begun(self) -> int:
        """The last round that can no longer be entered."""
        return max(self.round, self.work.seq) if self.work is not None and self.work.is_whole else self.round

    def enter(self, worker: int, incarnation: int, first: int) -> None:
        """Expect a new life of a worker; what its former one sent counts only if it is being applied."""
        self.ledger.enter(worker, incarnation, first)
        taken = self.work.contributions if self.work is not None else ()

        def stays(item: Contribution) -> bool:
            is_older = item.worker == worker and item.push.incarnation < incarnation
            return not is_older or item in taken

        for seq, items in list(self._open.items()):
            self._open[seq] = {who: item for who, item in items.items() if stays(item)}
            if not self._open[seq]:
                del self._open[seq]
        self._queue = deque(item for item in self._queue if stays(item))
        self.forget(worker)

    def push(self, push: Push, payload: memoryview) -> bool:
        """Take a contribution in; return whether it had been applied before."""
        worker = push.worker
        self.holding.check(push, payload)
        verdict = self.ledger.judge(worker, push.incarnation, push.seq)
        self._note(worker, push.have)
        if verdict is Verdict.REPEAT:
            return True
        item = Contribution(worker, push, payload)
        if push.bound == WHOLE_ROUND:
            if not self.round < push.seq <= self.round + AHEAD:
                raise WireError(
                    f"worker {worker} pushed round {push.seq} of part {push.part}, which is at {self.round}",
                    hint="start the worker again; it joins at the next round",
                )
            self._open.setdefault(push.seq, {}).setdefault(worker, item)
        else:
            queued = sum(other.worker == worker for other in self._queue)
            unanswered = queued + sum(other.worker == worker for other in self._held)
            # One that comes too early is not taken; the worker asks, and sends it again.
            if push.seq == self.ledger.seq(worker) + queued + 1 and unanswered < AHEAD:
                self._queue.append(item)
        return False

    def has(self, worker: int, seq: int) -> bool:
        """Say whether a push has arrived, applied or not."""
        return (
            self.ledger.seq(worker) >= seq
            or worker in self._open.get(seq, ())
            or any(item.worker == worker and item.push.seq == seq for item in self._queue)
        )

    def next_work(self, members: Members) -> Work | None:
        """Return the next update that can be computed, if there is one; the part is busy until `finish`."""
        if self.work is not None or members.due(self.round + 1) is None:
            return None
        first = members.first_entry()
        if first is not None:  # nobody will push the rounds before: their workers died between two parts
            self.round = max(self.round, min([first, *self._open]) - 1)
        seq = self.round + 1
        there = self._open.get(seq)
        if there and all(worker in there for worker in members.due(seq) or ()):
            taken = [there[worker] for worker in sorted(there)]
            self.work = Work(self, seq, taken, self.clip, members.expected)
        elif (item := self._next_in_queue()) is not None:
            self.work = Work(self, item.push.seq, [item], False, members.expected)
        if self.work is not None:
            self.work.scale = None if self.work.clip else 1.0
            self.work.look()
        return self.work

    @property
    def has_pushes(self) -> bool:
        """Whether pushes are here that are not applied yet."""
        return bool(self._open or self._queue)

    @property
    def has_queue(self) -> bool:
        """Whether pushes are here that wait for no other worker's."""
        return bool(self._queue)

    def commit_of(self, push: Push) -> Commit | None:
        """What the worker of a push has said of its step."""
        return self.commits.of(push.worker, push.incarnation, push.seq)

    def _next_in_queue(self) -> Contribution | None:
        """The first push that waits for nobody and may be applied: each worker's in their order."""
        waiting: set[int] = set()
        for item in self._queue:
            if item.worker not in waiting and not self._is_open(item):
                return item
            waiting.add(item.worker)
        return None

    def _is_open(self, item: Contribution) -> bool:
        """Whether a push came before its worker's step, of which nothing is known yet."""
        return item.push.early and self.commit_of(item.push) is None

    def finish(self, work: Work) -> Reply:
        """Record finished work; return what brings the workers up to date."""
        if work.reply is None:
            raise ValueError("work that has not run")
        self.work = self._full = self._state = None
        for item in work.contributions:
            self.ledger.record(item.worker, item.push.incarnation, work.seq)
        self._is_whole = work.is_whole
        if work.is_whole:
            self.round = self._last_whole = work.seq
            self._open.pop(work.seq, None)
        else:
            item = work.contributions[0]
            self._queue.remove(item)
            if self.ledger.incarnation(item.worker) == item.push.incarnation:
                self._held.append(item)
        self.version = work.reply.version
        self._log.append(work.reply)
        self._trim()
        return work.reply

    def drop(self, work: Work, workers: Collection[int] | None = None) -> None:
        """Give up work: what some workers have contributed is forgotten and the others wait on, or all is."""
        self.work = None
        work.let_go()
        if not work.is_whole:
            self._queue.remove(work.contributions[0])
            return
        items = self._open[work.seq]
        for item in work.contributions:
            if workers is None or item.worker in workers:
                del items[item.worker]
        if not items:
            del self._open[work.seq]

    def answer(self, worker: int, seq: int, have: int) -> list[Reply] | None:
        """Return what answers an applied push of a worker that holds version `have`.

        `None`: it takes the part itself, which is being worked on; ask again after `finish`.
        Asked twice, the answer leads to the same version: a worker may ignore the second one.
        """
        if seq <= self._last_whole:  # every round has a reply of its own
            entries = [entry for entry in self._log if entry.seq == seq][-1:]
        else:
            last = self._lead(worker, seq, have)
            if have >= last:
                return []
            entries = [entry for entry in self._log if have < entry.version <= last]
            if entries and entries[-1].is_full:
                entries = entries[-1:]
            elif entries and entries[0].version != have + 1:
                entries = []
        if entries:
            return entries
        full = self.full()
        return None if full is None else [full]

    def _lead(self, worker: int, seq: int, have: int) -> int:
        """The version that the answer to a push leads to: now, or the last that went out as a whole."""
        given = self._given.setdefault(worker, {})
        if seq not in given:
            wholes = [entry.version for entry in self._log if entry.is_full and entry.version > have]
            given[seq] = wholes[-1] if wholes else self.version
            for old in sorted(given)[: -AHEAD - 1]:
                del given[old]
        return given.get(seq, self.version)

    def full(self) -> Reply | None:
        """The whole part as it is now; `None` while it is being worked on."""
        if self._log and self._log[-1].is_full and self._log[-1].version == self.version:
            return self._log[-1]
        if self._full is None and not self.is_updating:
            self._full = replace(self.holding.full(self.round), statistics=self.holding.history.pack())
        return self._full

    def delta(self) -> Reply | None:
        """What made this version of the part of the one before; none if it is not known, or is all of it."""
        last = self._log[-1] if self._log else None
        is_known = last is not None and (last.version, last.seq) == (self.version, self.round)
        return last if is_known and last is not None and not last.is_full else None

    def state(self) -> memoryview:
        """The optimizer's state as it is now, as a payload: one copy, however many ask."""
        if self._state is None:
            self._state = self.holding.optimizer_state()
        return self._state

    def release(self, present: Collection[int]) -> list[tuple[int, int, list[Reply]]]:
        """Return the (worker, seq, replies) of bounded pushes that need wait no longer."""
        slowest = min((self.ledger.seq(worker) for worker in present), default=0)
        released, still = [], []
        for item in self._held:
            worker, seq = item.worker, item.push.seq
            if worker not in present:
                continue
            # It will have what its last answer led to by the time it takes this one.
            have = max(item.push.have, self._given.get(worker, {}).get(seq - 1, 0))
            waits = seq - slowest > item.push.bound
            replies = None if waits else self.answer(worker, seq, have)
            if replies is None:
                still.append(item)
            else:
                released.append((worker, seq, replies))
        self._held = still
        return released

    def settle(self, present: Collection[int]) -> None:
        """Where workers do not wait for each other: what all have done cannot be entered any more."""
        if self._is_whole:
            return
        self.round = max(self.round, min((self.ledger.seq(worker) for worker in present), default=0))
        for seq in [seq for seq in self._open if seq <= self.round]:
            del self._open[seq]

    def is_held(self, worker: int, seq: int) -> bool:
        return any(item.worker == worker and item.push.seq == seq for item in self._held)

    def forget(self, worker: int) -> None:
        """Stop keeping replies for a worker that is gone."""
        self._have.pop(worker, None)
        self._given.pop(worker, None)
        self._held = [item for item in self._held if item.worker != worker]
        self._forget_open(worker)
        self._trim()

    def _forget_open(self, worker: int) -> None:
        """Drop pushes of a worker that is gone before it has said whether it takes the step."""
        taken = self.work.contributions if self.work is not None else ()

        def stays(item: Contribution) -> bool:
            return item.worker != worker or item in taken or not self._is_open(item)

        for seq, items in list(self._open.items()):
            self._open[seq] = {who: item for who, item in items.items() if stays(item)}
            if not self._open[seq]:
                del self._open[seq]
        self._queue = deque(item for item in self._queue if stays(item))

    def _note(self, worker: int, have: int) -> None:
        self._have[worker] = max(have, self._have.get(worker, 0))
        self._trim()

    def _trim(self) -> None:
        """Drop what every worker has, and what would grow beyond the part itself."""
        oldest = min(self._have.values(), default=self.version)
        limit = self.holding.params.nbytes + (1 << 16)
        size = sum(entry.size_bytes for entry in self._log)
        while self._log and (
            self._log[0].version <= oldest
            or len(self._log) > LOG_LIMIT
            or (len(self._log) > AHEAD and size > limit)
        ):
            size -= self._log.popleft().size_bytes
