"""One update of a part: its contributions are summed, then the rule is applied and the answer encoded.

Contributions are summed in the order of the workers, not of arrival, so the bits do not depend on timing.

Gradients leave during backward, when nobody knows yet whether all of them are finite. A shard sums them
as they come, and updates no part before it has the commits of all who push to the round. So a step is
taken whole, or by no part of any shard. A commit also tells what the script has set since the last round,
which must be the same on all workers.

So a sum may wait: for commits, for the scale to clip by, or for what the script has set. Whatever it is,
it comes with a message to the shard, which then asks `Waiting` what can go on. Nothing waits for a worker
that is gone: what it has not committed to is dropped, and the others' sum is made anew.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

from shoestring.codec.base import Vector
from shoestring.codec.registry import LOSSLESS, codec_of
from shoestring.errors import ShoestringError, UsageError
from shoestring.model import statistics
from shoestring.model.parts import is_flagged, unpack_used
from shoestring.model.vectors import PARAMS, Vectors, checksums_of, state_names, unpack
from shoestring.server import rules
from shoestring.server.holding import Holding, Reply
from shoestring.server.members import Member
from shoestring.wire import messages as say
from shoestring.wire.messages import WHOLE_ROUND, WIDE, Commit, Decisions, Push

if TYPE_CHECKING:
    from shoestring.server.rounds import PartRounds

_KEPT = 4  # rounds of each worker: it has no more under way


class Commits:
    """The last commits of each worker, by the incarnation that said them and the round.

    Those of a former life are among them: a sum may wait for another worker's commit.
    """

    def __init__(self) -> None:
        self._known: dict[int, dict[tuple[int, int], Commit]] = {}  # by worker

    def add(self, worker: int, incarnation: int, commit: Commit) -> None:
        """Note what a worker has said; the first time counts."""
        known = self._known.setdefault(worker, {})
        known.setdefault((incarnation, commit.seq), commit)
        for key in sorted(known)[:-_KEPT]:
            del known[key]

    def of(self, worker: int, incarnation: int, seq: int) -> Commit | None:
        """What a worker has said of a round."""
        return self._known.get(worker, {}).get((incarnation, seq))


@dataclass(frozen=True, eq=False)
class Contribution:
    worker: int
    push: Push
    payload: memoryview


@dataclass
class Work:
    """One update of a part, ready to be computed: `run` it, then give it to `PartRounds.finish`."""

    rounds: "PartRounds"
    seq: int
    contributions: Sequence[Contribution]  # in worker order
    clip: bool
    workers: int = 1  # that the run has
    skip: bool | None = None  # whether the round is; not known while a commit is missing
    missing: set[int] = field(default_factory=set)  # workers of which no commit is known
    wants: tuple[str, ...] = ()  # vectors that the script has set since the last round
    put: Vectors | None = None  # what they are to be
    is_asked: bool = False  # whether a worker was asked for them
    error: ShoestringError | None = None  # the workers do not agree
    total: Vector | None = None
    is_void: bool = False  # the sum is not finite, though all that was summed is
    squares: float = 0.0
    scale: float | None = None  # to clip by
    reply: Reply | None = None
    culprit: int | None = None  # the worker whose bytes could not be decoded

    @property
    def is_whole(self) -> bool:
        return self.contributions[0].push.bound == WHOLE_ROUND

    @property
    def is_saved(self) -> bool:
        return any(item.push.save for item in self.contributions)

    @property
    def is_decided(self) -> bool:
        """Whether all is known that the update needs. Whoever finds that out runs the work once more."""
        if self.error is not None:
            return True
        is_put = not self.wants or self.put is not None
        return self.skip is not None and is_put and (self.skip or self.is_void or self.scale is not None)

    @property
    def has_norm(self) -> bool:
        """Whether the norm over all parts is waited for, of which this part's is known."""
        return self.clip and self.total is not None and self.scale is None

    @property
    def _commits(self) -> list[Commit | None]:
        return [self.rounds.commit_of(item.push) for item in self.contributions]

    def uncommitted(self) -> set[int]:
        """The workers whose commits are waited for."""
        pairs = zip(self.contributions, self._commits, strict=True)
        return {item.worker for item, commit in pairs if item.push.early and commit is None}

    def look(self) -> None:
        """Find out whether the round is skipped, and what is put, if all have said so."""
        if self.uncommitted():
            return
        pairs = zip(self.contributions, self._commits, strict=True)
        said = {item.worker: commit for item, commit in pairs if commit is not None}
        skips = any(commit.skip for commit in said.values())
        self.skip = skips or any(item.push.skip for item in self.contributions)
        try:
            self.wants = wants_of(said, self.rounds.holding)
        except ShoestringError as error:
            self.error = error

    def run(self) -> None:
        """Sum, and once all is known that the update needs, update and encode."""
        with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is looked for
            self._run()

    def _run(self) -> None:
        if self.error is not None:
            raise self.error
        holding = self.rounds.holding
        is_summed = self.total is not None or self.is_void
        if not is_summed and not self.skip and not any(item.push.skip for item in self.contributions):
            total = self.total = self._sum()
            # Finite gradients can have a sum that is not. The first test is cheap, and enough but for that.
            is_finite = np.isfinite(total.sum()) or np.isfinite(total).all()
            self.is_void = not is_finite and not holding.is_mean
            if self.is_void:
                self.let_go()
            elif self.clip:
                self.squares = rules.sum_squares(total, self._mean())
        if not self.is_decided:
            return
        self._refuse_other_values()
        if self.put is not None:
            holding.put(self.put)
        if self.skip or self.total is None:
            reply = holding.hold(self.seq)
            self.reply = self._mark(reply if self.put is None else replace(holding.full(self.seq), skip=True))
            self.let_go()
            return
        wish = min(self.contributions, key=lambda item: (item.push.reply_cost, item.push.reply)).push
        self.reply = self._mark(
            holding.advance(
                self.total,
                scale=self._factor(),
                hyper=self.contributions[0].push.hyper,
                used=self._used(),
                codec=wish.reply if self.put is None else LOSSLESS,
                seq=self.seq,
                slot=self.rounds.free_slot() if self.is_whole else -1,
                fates=self.contributions[0].push.fates,
            )
        )
        self.let_go()

    def _refuse_other_values(self) -> None:
        """Raise if a worker's parameters are not what the shard or another worker has.

        Where the script has changed them in a way that torch notices, they are put here instead.
        """
        if PARAMS in self.wants:
            return
        holding = self.rounds.holding
        known: dict[int, bytes] = {}  # by version
        for item in self.contributions:
            have, sums = item.push.have, item.push.checksums
            if not sums or not self.is_whole:
                continue
            if have not in known:
                is_here = have == holding.version
                known[have] = checksums_of(holding.values, holding.part) if is_here else sums
            if sums != known[have]:
                pairs = zip(range(len(holding.part.pieces)), _quads(sums), _quads(known[have]), strict=True)
                piece = next(piece for piece, own, other in pairs if own != other)
                raise UsageError(
                    f"parameter `{holding.names[piece]}` of worker {item.worker} is not what shards have: "
                    "it was changed in a way that torch does not notice, as through `.data`",
                    hint="change it under `torch.no_grad()` without `.data`, on all workers alike; or leave "
                    "parameters to the script: `model = shoestring.wrap(model)`",
                )

    def let_go(self) -> None:
        """Give back the memory of the sum."""
        if self.total is not None:
            if self.total.dtype == np.float32:
                self.rounds.take_back(self.total)
            self.total = None

    def _sum(self) -> Vector:
        part = self.rounds.holding.part
        if any(item.push.codec == WIDE for item in self.contributions):
            return cast(Vector, self._sum_wide())
        total = self.rounds.lend(part.size)
        for place, item in enumerate(self.contributions):
            weight = item.push.weight
            if not item.push.codec:  # none of its pieces has a gradient
                if not place:
                    total[:] = 0
                continue
            if item.push.codec == LOSSLESS:  # the values themselves
                values = np.frombuffer(item.payload, np.float32)
                if not place:
                    np.multiply(values, np.float32(weight), out=total)
                else:
                    total += values if weight == 1.0 else np.float32(weight) * values
                continue
            try:
                codec_of(item.push.codec).decode(item.payload, part.layout, total, weight if place else None)
            except ShoestringError:
                self.culprit = item.worker
                raise
            if not place and weight != 1.0:
                total *= np.float32(weight)
        return total

    def _sum_wide(self) -> NDArray[np.float64]:
        """The sum in float64, where any contribution is."""
        part = self.rounds.holding.part
        total = np.zeros(part.size, np.float64)
        for item in self.contributions:
            codec = item.push.codec
            if codec in (WIDE, LOSSLESS):
                total += item.push.weight * np.frombuffer(item.payload, codec)
            elif codec:
                values = np.empty(part.size, np.float32)
                try:
                    codec_of(codec).decode(item.payload, part.layout, values)
                except ShoestringError:
                    self.culprit = item.worker
                    raise
                total += item.push.weight * values
        return total

    def _factor(self) -> float:
        """What the sum is multiplied by to be the mean, clipped."""
        clip = 1.0 if self.scale is None else self.scale
        if self.total is not None and self.total.dtype == np.float64:
            return clip / sum(item.push.weight for item in self.contributions)
        return float(np.float32(self._mean()) * np.float32(clip))

    def _mean(self) -> float:
        return float(np.float32(1.0 / sum(item.push.weight for item in self.contributions)))

    def _used(self) -> NDArray[np.bool_]:
        pieces = len(self.rounds.holding.part.pieces)
        if any(not item.push.used for item in self.contributions):
            return np.ones(pieces, bool)
        used = np.zeros(pieces, bool)
        for item in self.contributions:
            used |= unpack_used(item.push.used, pieces)
        return used

    def _mark(self, reply: Reply) -> Reply:
        """Add the first worker's decisions, what may have been lost on its way, and what workers share."""
        return replace(
            reply,
            squares=self.squares,
            statistics=self._remember(),
            decisions=self._decisions(),
            news=self.contributions[0].push.news,
        )

    def _decisions(self) -> Decisions | None:
        first = self.contributions[0].push.decisions
        given = [item.push.decisions for item in self.contributions]
        paces = tuple(one.paces[0] if one is not None and one.paces else 0.0 for one in given)
        if not self.is_whole or not any(paces):
            paces = ()
        witnesses = tuple(seen for one in given if one is not None for seen in one.witnesses)
        if first is None:
            return Decisions(paces=paces, witnesses=witnesses) if paces or witnesses else None
        return Decisions(first.delay, first.shares, paces, witnesses, first.policy)

    def _remember(self) -> bytes:
        """Add what the workers' layers have seen to the history; the last thing that work changes."""
        history = self.rounds.holding.history
        if not history.layers:
            return b""
        seen = [item.push.statistics for item in self.contributions if item.push.statistics]
        share = 1 / max(len(seen), 1) if self.is_whole else 1 / self.workers
        history.take([statistics.unpack(data, history.layers) for data in seen], share)
        return history.pack()


class Waiting:
    """The sums of one shard that wait, by round and part."""

    def __init__(self, present: Callable[[Work], Sequence[Member]], send: Callable[..., None]) -> None:
        self._present = present  # of those who have pushed to some work, in order
        self._send = send
        self._works: dict[int, dict[int, Work]] = {}

    def __len__(self) -> int:
        return len(self._works)

    def add(self, index: int, work: Work) -> None:
        """Keep a sum until it can go on. Where it is clipped, tell its norm."""
        self._works.setdefault(work.seq, {})[index] = work
        work.missing = work.uncommitted()
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
                work.look()
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
        lost = [worker for worker in work.uncommitted() if worker not in there]
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


def wants_of(commits: Mapping[int, Commit], holding: Holding) -> tuple[str, ...]:
    """The vectors of a part that workers have set before a round; raise if some have and others have not."""
    index = holding.part.index
    changed = [w for w, commit in commits.items() if commit.changed and is_flagged(commit.changed, index)]
    if changed and len(changed) < len(commits):
        first, last = holding.names[0], holding.names[-1]
        where = f"`{first}`" if first == last else f"`{first}` to `{last}`"
        raise UsageError(
            f"parameters ({where}) were changed by the script on {_named(changed)} alone",
            hint="change parameters on all workers alike, between the same steps, or before `wrap`, "
            "which takes the first worker's; `model = shoestring.wrap(model)` leaves them to each worker",
        )
    loads = [worker for worker, commit in commits.items() if commit.loads]
    if loads and len(loads) < len(commits):
        raise UsageError(
            f"the optimizer's state was set on {_named(loads)} alone",
            hint="call `optimizer.load_state_dict` on all workers, between the same steps, or on the "
            "first one before `wrap`",
        )
    params = (PARAMS,) if changed else ()
    return params + (state_names(holding.rule) if loads else ())


def _named(workers: Sequence[int]) -> str:
    return f"worker{'s' if len(workers) > 1 else ''} {', '.join(map(str, workers))}"


def _quads(sums: bytes) -> list[bytes]:
    return [sums[start : start + 4] for start in range(0, len(sums), 4)]
