"""Which samples are this worker's, and where a resumed run goes on.

`batches` gives a `DataLoader` its batch sampler: every epoch is one order of all samples,
drawn from the seed and the epoch; each global batch is the next `workers * batch_size` of
it, and a worker takes its own run of them. So one epoch sees every sample at most once,
whatever the number of workers.

A run that is resumed goes on behind the last batch it trained on. Use `epochs(n)` for the
outer loop: it starts at the epoch that was not finished.
"""

from collections.abc import Iterator, Sequence, Sized
from dataclasses import dataclass

import torch

from shoestring.errors import UsageError
from shoestring.worker import session
from shoestring.worker.randomness import restore_random


@dataclass
class Position:
    """Where training is: epochs finished, and batches trained on since."""

    epoch: int = 0
    batch: int = 0


class Batches(torch.utils.data.Sampler[list[int]]):
    """This worker's batches of indices, epoch by epoch. Make one with `batches`."""

    def __init__(
        self,
        here: session.Session,
        samples: int,
        batch_size: int,
        *,
        shuffle: bool,
        seed: int,
        global_batch: int | None = None,
        shares: Sequence[float] | None = None,
    ) -> None:
        self._here = here
        self._samples = samples
        self._global_batch = batch_size * here.run.workers if global_batch is None else global_batch
        self._is_shared = global_batch is not None
        self._shuffle = shuffle
        self._seed = seed
        if self._global_batch < 1 or len(self) == 0:
            raise UsageError(
                f"{samples} samples make no batch of {self._global_batch} for {here.run.workers} workers",
                hint="give a smaller batch size or fewer workers",
            )
        if self._is_shared:
            here.sharing.begin(self._global_batch, shares)
        here.position_source = self
        self._position: Position | None = None  # until it is asked for: `wrap` may come after this
        self._skip = 0
        self._forwards = here.forwards

    @property
    def position(self) -> Position:
        """Where the next epoch begins: behind what a resumed run had trained on."""
        if self._position is None:
            self._position = Position(*self._here.resumed.position)
            self._skip = self._position.batch
        return self._position

    def __len__(self) -> int:
        return self._samples // self._global_batch

    def __iter__(self) -> Iterator[list[int]]:
        run, size = self._here.run, self._global_batch // self._here.run.workers
        order = self._order(self.position.epoch)
        first, self._skip = self._skip, 0
        if first:
            restore_random(self._here)
        self._forwards = self._here.forwards - first
        for number in range(first, len(self)):
            shares = self._here.sharing.fetch() if self._is_shared else (size,) * run.workers
            start = number * self._global_batch + sum(shares[: run.worker])
            yield order[start : start + shares[run.worker]]
        self._forwards = self._here.forwards
        self._position = Position(self.position.epoch + 1)

    def where(self) -> Position:
        """How far training has come, batches that were only fetched ahead not counted."""
        done = self._here.forwards - self._forwards
        if done >= len(self):
            return Position(self.position.epoch + 1)
        return Position(self.position.epoch, done)

    def _order(self, epoch: int) -> list[int]:
        if not self._shuffle:
            return list(range(self._samples))
        source = torch.Generator().manual_seed(1_000_003 * self._seed + epoch)
        order: list[int] = torch.randperm(self._samples, generator=source).tolist()
        return order


def batches(
    dataset: Sized,
    batch_size: int | None = None,
    *,
    global_batch: int | None = None,
    shares: Sequence[float] | None = None,
    shuffle: bool = True,
    seed: int = 0,
) -> Batches:
    """Return this worker's batch sampler: `DataLoader(data, batch_sampler=shoestring.batches(data, 64))`.

    Give the samples a worker takes in a step (`batch_size`), or those of all workers together
    (`global_batch`). The latter are shared out evenly, in proportion to `shares` (one number a
    worker), or by speed with `wrap(batch="auto")`; gradients count by their samples.
    """
    if (batch_size is None) == (global_batch is None) or (shares is not None and global_batch is None):
        raise UsageError(
            "`batches` takes a batch size or a global batch, and shares of a global batch",
            hint="`batches(data, 64)`, or `batches(data, global_batch=512)`",
        )
    return Batches(
        session.current(),
        len(dataset),
        batch_size or 0,
        shuffle=shuffle,
        seed=seed,
        global_batch=global_batch,
        shares=shares,
    )


def epochs(count: int) -> Iterator[int]:
    """Count the epochs of a run, from the first that is not finished."""
    here = session.current()
    first, batch = here.resumed.position
    if first or batch:
        restore_random(here)
    yield from range(first, count)
