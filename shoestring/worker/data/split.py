"""`split`: a DataLoader's batches, shared out among the workers.

The loader that comes back is a copy of the one given, of the same class and with everything it was
built with; only the order in which it takes samples is another. All workers go through one order,
that of the loader's sampler with draws on which they agree, and take turns: see `stride.py`. The
samples of a stream (`IterableDataset`) are read by all workers, and each keeps its own.

No worker asks another. What must be equal on all of them: the dataset, the batch size, the seed,
and how many epochs were trained on.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, TypeVar

from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from torch.utils.data.datapipes.datapipe import IterDataPipe, MapDataPipe

from shoestring.config import Run
from shoestring.errors import UsageError
from shoestring.worker import session
from shoestring.worker.data.batches import Batches
from shoestring.worker.data.place import Place, Visit
from shoestring.worker.data.portion import SamplerPortion, StreamPortion
from shoestring.worker.data.stride import End, Stride
from shoestring.worker.randomness import restore_random
from shoestring.worker.session import Session

Batch = TypeVar("Batch")

# By these attributes samplers and streams of torch, Accelerate and others say whose part they are.
_PARTS = (("num_replicas", "rank"), ("num_processes", "process_index"))
_ENDS = ("fill", "drop", "uneven")
_WALK = "_shoestring_walk"  # an attribute of the loaders that are made here


def split(
    loader: DataLoader[Batch],
    *,
    seed: int = 0,
    end: Literal["fill", "drop", "uneven"] | None = None,
) -> DataLoader[Batch]:
    """Return a loader whose batches are those of this worker, as large as the given one's.

    Of every `workers` batches a worker takes one, in an order that is drawn from `seed` and the
    epoch, alike on all workers. At the end of an epoch all have had equally many: a last round that
    is not whole is filled with samples from the epoch's start (`end="fill"`), or dropped
    (`end="drop"`, the default where the loader has `drop_last`); with `end="uneven"` every sample
    comes once, and some workers have a batch less. A resumed run goes on behind the last batch that
    was trained on.

    A loader that has a `DistributedSampler` or `shoestring.batches` is returned as it is, and so is
    every loader in a world of one that keeps no checkpoints.
    """
    return split_for(session.current(), loader, seed=seed, end=end)


def split_for(
    here: Session, loader: DataLoader[Batch], *, seed: int = 0, end: End | None = None
) -> DataLoader[Batch]:
    """Do what `split` says, for a session that is given."""
    _check(loader, end)
    run = here.run
    is_tracked = run.checkpoint is not None or run.resume is not None
    if (run.workers == 1 and not is_tracked) or _is_split(loader, run):
        return loader
    return _copy(here, loader, seed, end)


def _check(loader: object, end: str | None) -> None:
    if not isinstance(loader, DataLoader):
        raise UsageError(
            f"`split` was given a `{type(loader).__name__}`",
            hint="give a torch `DataLoader`; other loaders have to be told which part is this worker's: "
            "`shoestring.init()` returns `worker` and `workers`",
        )
    if isinstance(loader.dataset, IterDataPipe | MapDataPipe):
        raise UsageError(
            "`split` was given a loader of a data pipe, which may split itself",
            hint="put `.sharding_filter()` into the pipe, or make it an `IterableDataset`",
        )
    if end is not None and end not in _ENDS:
        raise UsageError(f"end=`{end}`", hint='give "fill", "drop" or "uneven"')


def _is_split(loader: DataLoader[Any], run: Run) -> bool:
    """Whether the loader has only this worker's part; one that has another's is refused."""
    if _WALK in vars(loader):
        return True
    batch_sampler = loader.batch_sampler
    samplers: list[object] = [loader.sampler, batch_sampler, getattr(batch_sampler, "sampler", None)]
    if isinstance(loader.dataset, IterableDataset):
        samplers.append(loader.dataset)
    for sampler in samplers:
        if isinstance(sampler, Batches):
            return True
        for count, number in _PARTS:
            if not (hasattr(sampler, count) and hasattr(sampler, number)):
                continue
            found = (getattr(sampler, number), getattr(sampler, count))
            if found != (run.worker, run.workers):
                raise UsageError(
                    f"the loader has part {found[0]} of {found[1]}, by its `{type(sampler).__name__}`, "
                    f"but this is worker {run.worker} of {run.workers}",
                    hint=f"give the sampler `{count}` and `{number}` of this run, "
                    "or build the loader without it and let `shoestring.split` do it",
                )
            return True
    return False


def _copy(here: Session, loader: DataLoader[Batch], seed: int, end: End | None) -> DataLoader[Batch]:
    """A copy of the loader that takes this worker's samples only."""
    run, batch_sampler = here.run, loader.batch_sampler
    # Batches that torch's own sampler makes are filled up sample by sample, all others taken whole.
    plain = batch_sampler if type(batch_sampler) is BatchSampler else None
    drops = bool(getattr(batch_sampler, "drop_last", loader.drop_last))
    stride = Stride(
        run.worker,
        run.workers,
        1 if plain is None else plain.batch_size,
        end or ("drop" if drops else "fill"),
    )
    copied = copy.copy(loader)
    attributes = vars(copied)  # torch's own `__setattr__` lets these be set only once
    attributes["_iterator"] = None  # that of persistent workers
    portion: SamplerPortion | StreamPortion
    if isinstance(loader.dataset, IterableDataset):
        attributes["dataset"] = portion = StreamPortion(loader.dataset, stride, seed)
    else:
        given = loader.sampler if batch_sampler is None else batch_sampler
        source = given if plain is None else plain.sampler
        portion = SamplerPortion(source, stride, seed, is_batching=plain is not None)
        _refuse_nothing(portion, stride)
        attributes["sampler" if batch_sampler is None else "batch_sampler"] = portion
    attributes[_WALK] = _Walk(here, Place(here), portion)
    copied.__class__ = _split_class(type(loader))
    return copied


def _split_class(kind: type[DataLoader[Any]]) -> type[DataLoader[Any]]:
    """A class like that of a loader, whose loaders keep their place."""

    def begin(self: DataLoader[Any]) -> Iterator[Any]:
        walk: _Walk = vars(self)[_WALK]
        return walk.begin(lambda: kind.__iter__(self))

    return type(kind.__name__, (kind,), {"__module__": kind.__module__, "__iter__": begin})


def _refuse_nothing(portion: SamplerPortion, stride: Stride) -> None:
    source: Any = portion.source
    if portion.length == 0 and len(source) > 0:
        raise UsageError(
            f"{len(source)} {'samples' if portion.is_batching else 'batches'} make no round of {stride.size} "
            f"for each of {stride.workers} workers, and a round that is not whole is dropped",
            hint='give a smaller batch size or fewer workers, or `shoestring.split(loader, end="fill")`',
        )


@dataclass(frozen=True)
class _Walk:
    """Goes through a loader, and keeps its place."""

    here: Session
    place: Place
    portion: SamplerPortion | StreamPortion

    def begin(self, open_loader: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Begin the next epoch, behind what a resumed run had trained on."""
        visit = self.place.begin(self.portion.length if isinstance(self.portion, SamplerPortion) else None)
        if isinstance(self.portion, SamplerPortion):
            self.portion.begin(visit.epoch, visit.skip)
            batches = open_loader()
        else:
            self.portion.begin(visit.epoch)
            batches = open_loader()
            for _ in islice(batches, visit.skip):
                pass
        if visit.skip:
            restore_random(self.here)  # opening a loader draws from them
        return self._hand_out(batches, visit)

    def _hand_out(self, batches: Iterator[Any], visit: Visit) -> Iterator[Any]:
        is_whole = False
        try:
            for batch in batches:
                self.place.hand_out(visit)
                yield batch
            is_whole = True
        finally:
            self.place.end(visit, is_whole=is_whole)
