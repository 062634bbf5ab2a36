"""What waits at a shard: sums for what their update needs, and workers for a part to be at rest.

A sum may wait for the commits of all, a scale, or what the script has set. Whatever it is, it comes with
a message to the shard, which then asks here what can go on. Nothing waits for a worker that is gone: what
it has not committed to is dropped, and the others' sum is made anew.

A worker that asks for a part, its parameters or what the optimizer's rule keeps of it, is answered once
the part is there, has come to the round that it names, and nobody is changing it.
"""

from collections.abc import Callable, Collection, Mapping, Sequence

from shoestring.model.vectors import state_names, unpack
from shoestring.server.commits import Commits
from shoestring.server.members import Member, Members
from shoestring.server.rounds import PartRounds
from shoestring.server.work import Work
from shoestring.wire import messages as say
from shoestring.wire.messages import Message

_EMPTY = memoryview(b"")


class Waiting:
    """The sums of one shard that wait, by round and part."""

    def __init__(
        self, commits: Commits, present: Callable[[Work], Sequence[Member]], send: Callable[..., None]
    ) -> None:
        self._commits = commits
        self._present = present  # of those who have pushed to some work, in order
        self._send = send
        self._works: dict[int, dict[int, Work]] = {}

    def __len__(self) -> int:
        return len(self._works)

    def add(self, index: int, work: Work) -> None:
        """Keep a sum until it can go on. Where it is clipped, tell its norm."""
        self._works.setdefault(work.seq, {})[index] = work
        work.missing = work.rounds.missing(work)
        if work.has_norm:  # the norm over all parts and shards comes first
            for member in self._present(work):
                self._send(member.identity, say.Norm(index, work.seq, work.squares))

    def has(self, seq: int, index: int) -> bool:
        """Whether a part's sum of a round waits."""
        return index in self._works.get(seq, ())

    def remind(self, seq: int, index: int, member: Member) -> None:
        """Say again to a worker that asks what it may not have heard."""
        work = self._works[seq][index]
        if work.has_norm:
            self._send(member.identity, say.Norm(index, seq, work.squares))
        self._ask_for_put(index, work, member.worker)

    def scale(self, seq: int, scale: float) -> None:
        """Take the scale of a round; the first counts."""
        # Whoever knows the norm has heard of every part: all that need it are here.
        for work in self._works.get(seq, {}).values():
            if work.scale is None:
                work.scale = scale

    def put(self, member: Member, put: say.Put, payload: memoryview) -> None:
        """Take what a script has set a part to, from the worker that was asked."""
        work = self._works.get(put.seq, {}).get(put.part)
        if work is None or work.put is not None or self._giver(work) is not member:
            return  # it came again, or late
        vectors = unpack(put.names, payload, work.rounds.holding.part, work.rounds.holding.rule)
        if put.names == work.wants:
            work.put = vectors

    def decide(self, seq: int, worker: int = -1) -> list[Work]:
        """Take out the sums of a round that can go on, the lowest part first.

        `worker` has just committed to it. A model may have a thousand parts and a run a hundred workers: so
        it is not asked of every sum with every commit who has committed.
        """
        works = self._works.get(seq, {})
        decided = []
        for index in sorted(works):
            work = works[index]
            work.missing.discard(worker)
            if work.skip is None and not work.missing:
                work.rounds.look(work)
            if work.is_decided:
                decided.append(works.pop(index))
            elif not work.is_asked:
                self._ask_for_put(index, work)
        if not works:
            self._works.pop(seq, None)
        return decided

    def drop_orphans(self) -> list[int]:
        """Give up what waits for what nobody can say any more; return the parts."""
        waiting = [(index, work) for works in self._works.values() for index, work in works.items()]
        return [index for index, work in waiting if self.drop_orphan(index, work)]

    def drop_orphan(self, index: int, work: Work) -> bool:
        """Give a sum up if it waits for what nobody can say any more; say whether.

        A scale can be named by all who have pushed to the round, a commit by one alone: what that one
        has pushed is dropped.
        """
        there = {member.worker for member in self._present(work)}
        lost = [worker for worker in work.rounds.missing(work) if worker not in there]
        if there and not lost:
            self._ask_for_put(index, work)
            return False
        work.rounds.drop(work, lost or None)
        del self._works[work.seq][index]
        if not self._works[work.seq]:
            del self._works[work.seq]
        return True

    def _giver(self, work: Work) -> Member | None:
        """The worker whose values count where the script has set them."""
        return next(iter(self._present(work)), None)

    def _ask_for_put(self, index: int, work: Work, worker: int | None = None) -> None:
        """Ask for what is put, or remind one worker of it, if that is the one that gives it."""
        if not work.wants or work.put is not None:
            return
        giver = self._giver(work)
        if giver is not None and worker in (None, giver.worker):
            work.is_asked = True
            self._send(giver.identity, say.Wanted(index, work.seq))


class Readers:
    """The questions that wait: one of a kind for each worker and part."""

    def __init__(self, members: Members, send: Callable[[bytes, Message, memoryview], None]) -> None:
        self._members = members
        self._send = send
        self._pulls: dict[tuple[int, int], say.Pull] = {}  # by part and worker
        self._states: dict[tuple[int, int], say.AskState] = {}

    def __len__(self) -> int:
        return len(self._pulls) + len(self._states)

    def pull(self, worker: int, question: say.Pull) -> None:
        """Note that a worker wants a part's parameters."""
        self._pulls[question.part, worker] = question

    def ask_state(self, worker: int, question: say.AskState) -> None:
        """Note that a worker wants the optimizer's state of a part."""
        self._states[question.part, worker] = question

    def forget(self, worker: int) -> None:
        """Drop the questions of a worker that is gone."""
        self._pulls = {key: asked for key, asked in self._pulls.items() if key[1] != worker}
        self._states = {key: asked for key, asked in self._states.items() if key[1] != worker}

    def answer(self, parts: Mapping[int, PartRounds], filled: Collection[int]) -> None:
        """Answer what can be answered now."""
        for (index, worker), pull in list(self._pulls.items()):
            rounds, member = parts[index], self._members.get(worker)
            is_ready = index in filled and rounds.round >= pull.round
            full = rounds.full() if is_ready else None
            if full is not None and member is not None:
                del self._pulls[index, worker]
                message = say.Full(part=index, version=full.version, seq=0, statistics=full.statistics)
                has_values = rounds.holding.has_values
                self._send(member.identity, message, full.payload.data if has_values else _EMPTY)
        for (index, worker), asked in list(self._states.items()):
            rounds, member = parts[index], self._members.get(worker)
            is_ready = index in filled and rounds.round >= asked.round and not rounds.is_updating
            if is_ready and member is not None:
                self._answer_state(rounds, member, self._states.pop((index, worker)))

    def _answer_state(self, rounds: PartRounds, member: Member, asked: say.AskState) -> None:
        names = state_names(rounds.holding.rule)
        self._send(member.identity, say.State(asked.part, asked.round, names), rounds.state())
