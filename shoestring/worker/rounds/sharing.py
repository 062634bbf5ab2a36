"""How the samples of a global batch are shared out among workers of unequal speed.

With `batches(data, global_batch=...)` every step trains on the same samples, whatever the
shares: a worker's gradient counts by its number of samples, so the mean over all workers is
the mean over the global batch.

With `wrap(batch="auto")` workers tell each other what a step's own work took them. The first
one moves samples from the slow to the fast where that pays (`fleet.split`), and names the step
from which the new shares hold: far enough ahead that no worker has fetched its batch yet.
"""

import statistics
from collections import deque
from collections.abc import Callable, Sequence

from shoestring.errors import UsageError, WireError
from shoestring.fleet.allocate.split import Curve, Split, rebalance, split
from shoestring.wire.messages import Shares

NOTICE = 64  # steps between a decision and its effect: batches are fetched ahead
WINDOW = 16  # steps that are looked at together


class Sharing:
    """The shares of one run, as every worker knows them alike."""

    def __init__(self, worker: int, workers: int, passes: Callable[[], int]) -> None:
        self.is_auto = False
        self.step = 0  # the last that was finished
        self._worker = worker
        self._workers = workers
        self._passes = passes  # training passes through the model so far
        self._global_batch = 0
        self._schedule: dict[int, tuple[int, ...]] = {}  # from a step on
        self._sizes: deque[int] = deque()  # of batches that were fetched and not yet trained on
        self._seen = 0
        self._resumed: list[Sequence[int]] = []
        self._took: deque[Sequence[float]] = deque(maxlen=WINDOW)  # what a step took each worker

    @property
    def is_on(self) -> bool:
        """Whether a global batch is shared out."""
        return self._global_batch > 0

    def begin(self, global_batch: int, shares: Sequence[float] | None) -> None:
        """Share a global batch out, evenly or by `shares`, until better ones are known."""
        weights = list(shares) if shares is not None else [1.0] * self._workers
        if len(weights) != self._workers or any(not weight > 0 for weight in weights):
            raise UsageError(
                f"shares {weights} for {self._workers} workers",
                hint="give one positive number for each worker, or none for equal shares",
            )
        if global_batch < self._workers:
            raise UsageError(
                f"a global batch of {global_batch} for {self._workers} workers",
                hint="every worker takes at least one sample a step",
            )
        self._global_batch = global_batch
        self._schedule = {0: _shared_out(global_batch, weights)}
        self._seen = self._passes()
        self.load(self._resumed)

    def fetch(self) -> tuple[int, ...]:
        """The shares of the next batch that is fetched."""
        shares = self._at(self.step + len(self._sizes) - (self._passes() - self._seen) + 1)
        self._sizes.append(shares[self._worker])
        return shares

    def weigh(self) -> float:
        """How much the gradient counts that the passes since the last call have made."""
        if not self.is_on:
            return 1.0
        done = self._passes() - self._seen
        self._seen += done
        samples = sum(self._sizes.popleft() for _ in range(min(done, len(self._sizes))))
        return float(samples) if samples else 1.0

    def hear(self, paces: Sequence[float]) -> None:
        """Take note of what a step took each worker."""
        if len(paces) == self._workers and all(pace > 0 for pace in paces):
            self._took.append(paces)

    def decide(self) -> Shares | None:
        """The shares that the first worker wants from a later step on; none where nothing changes."""
        latest = max(self._schedule, default=0)
        is_settled = len(self._took) == WINDOW and self.step >= latest + WINDOW
        if not (self.is_auto and self.is_on and is_settled):
            return None
        shares = self._schedule[latest]
        measured = [statistics.median(took) for took in zip(*self._took, strict=True)]
        # In proportion to the samples: what a step costs besides comes out at the next look.
        most = self._global_batch - self._workers + 1
        curves = tuple(
            Curve(0.0, took_s / share, most, 1) for took_s, share in zip(measured, shares, strict=True)
        )
        better = rebalance(Split(shares, curves), measured)
        self._took.clear()
        return None if better is None else Shares(self.step + NOTICE, better.batches)

    def obey(self, shares: Shares) -> None:
        """Take over what the first worker has decided."""
        if not self.is_on:
            return
        if len(shares.samples) != self._workers or sum(shares.samples) != self._global_batch:
            raise WireError(
                f"shares {shares.samples} of a global batch of {self._global_batch} "
                f"among {self._workers} workers",
                hint="give `batches` the same `global_batch` on every worker",
            )
        self._schedule[shares.step] = shares.samples

    def state(self) -> list[list[int]]:
        """The shares from now on, for a checkpoint."""
        return [[step, *shares] for step, shares in sorted(self._schedule.items())]

    def load(self, state: Sequence[Sequence[int]]) -> None:
        """Go on from a checkpoint, whose shares take the place of the first ones."""
        self._resumed = list(state)
        fits = [len(shares) == self._workers and sum(shares) == self._global_batch for _, *shares in state]
        if self.is_on and fits and all(fits):
            self._schedule = {step: tuple(shares) for step, *shares in state}

    def _at(self, step: int) -> tuple[int, ...]:
        start = max(first for first in self._schedule if first <= step)
        for first in [first for first in self._schedule if first < start and first < self.step]:
            del self._schedule[first]
        return self._schedule[start]


def _shared_out(total: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Whole numbers in proportion to weights, one at least, that sum to the total."""
    curves = [Curve(0.0, 1.0 / weight, total, 1) for weight in weights]
    return split(total, curves).batches
