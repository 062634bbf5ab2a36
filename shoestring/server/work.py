"""One update of a part: its contributions are summed, then the rule is applied and the answer encoded.

`run` may be called on any thread. It goes as far as is known: where pushes came before their workers'
steps, or are clipped, the sum waits for commits (`commits.py`) and for the scale, and is run once more.
Contributions are summed in the order of the workers, not of arrival, so the bits do not depend on timing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

from shoestring.codec.base import Vector
from shoestring.codec.registry import LOSSLESS, codec_of
from shoestring.errors import ShoestringError, UsageError
from shoestring.model.parts import unpack_used
from shoestring.model.statistics import unpack
from shoestring.model.vectors import PARAMS, Vectors, checksums_of
from shoestring.server import rules
from shoestring.server.holding import Reply
from shoestring.wire.messages import WHOLE_ROUND, WIDE, Decisions, Push

if TYPE_CHECKING:
    from shoestring.server.rounds import PartRounds


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
        return Decisions(first.delay, first.shares, paces, witnesses)

    def _remember(self) -> bytes:
        """Add what the workers' layers have seen to the history; the last thing that work changes."""
        history = self.rounds.holding.history
        if not history.layers:
            return b""
        seen = [item.push.statistics for item in self.contributions if item.push.statistics]
        share = 1 / max(len(seen), 1) if self.is_whole else 1 / self.workers
        history.take([unpack(data, history.layers) for data in seen], share)
        return history.pack()


def _quads(sums: bytes) -> list[bytes]:
    return [sums[start : start + 4] for start in range(0, len(sums), 4)]
