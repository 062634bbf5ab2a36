"""`cached`: a dataset whose decoded samples are shared by all jobs of the host.

The first process that wants a sample decodes it and stores it in the host's memory; every
other process and every later epoch takes it from there. Two that want the same one at the same
time: one decodes, the other waits for it, for no longer than `patience_s`. If the first dies,
the kernel gives its claim up and the other takes over.

In a batch, samples that another process is just decoding are left to the end. So jobs that go
through a dataset in the same order share the work instead of waiting for each other.

The cache is never needed: where there is no room, or anything is wrong with it, the sample
comes from the dataset.
"""

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from shoestring.cache import samples
from shoestring.cache.folder import About, CacheFolder, read_size
from shoestring.cache.patience import attempts
from shoestring.cache.store import Store, close_store, open_store
from shoestring.errors import FleetError, UsageError

Sample = TypeVar("Sample")
SampleOut = TypeVar("SampleOut", covariant=True)

_LONGEST_PAUSE_S = 0.005


class Indexed(Protocol[SampleOut]):
    """A dataset that has a length and gives a sample for an index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> SampleOut: ...


@dataclass
class Counts:
    """What this process did with a cached dataset."""

    taken: int = 0  # from the cache
    decoded: int = 0
    stored: int = 0


class Cached(Generic[Sample]):
    """A dataset that looks into the cache first. Make one with `cached`.

    It can be forked, and sent to other processes: each opens the cache for itself.
    """

    def __init__(
        self,
        dataset: Indexed[Sample],
        folder: CacheFolder,
        about: About,
        budget_bytes: int | None,
        patience_s: float,
    ) -> None:
        self.dataset = dataset
        self.counts = Counts()
        self._folder = folder
        self._about = about
        self._budget_bytes = budget_bytes
        self._patience_s = patience_s

    def __len__(self) -> int:
        return self._about.length

    def __getitem__(self, index: int) -> Sample:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Iterable[int]) -> list[Sample]:
        """Return a batch of samples; torch's `DataLoader` asks for them in this way."""
        store = open_store(self._folder, self._about)
        wanted = [self._check(index) for index in indices]
        found: dict[int, Sample] = {}  # by place in the batch
        for decode in (False, True):  # what is there first: it is quick, and meanwhile more may come
            for place, index in enumerate(wanted):
                if place not in found and (one := self._try(store, index, decode)):
                    found[place] = one[0]
        for place, index in enumerate(wanted):
            if place not in found:
                found[place] = self._wait(store, index)
        return [found[place] for place in range(len(wanted))]

    def close(self) -> None:
        """Let go of the cache in this process; it is opened again when it is used."""
        close_store(self._folder, self._about)

    def _try(self, store: Store, index: int, decode: bool) -> tuple[Sample] | None:
        """The sample, unless it is not there and must not be decoded, or is being decoded by another."""
        if not decode:
            return self._stored(store, index)
        if store.is_full:  # nobody would find what is decoded, so nobody waits for it
            return self._stored(store, index) or (self._decode(index),)
        with store.claim(index) as is_mine:
            if not is_mine:
                return None
            # Looked for again: it may have been stored since, by whoever had the claim before.
            if (one := self._stored(store, index)) is not None:
                return one
            sample = self._decode(index)
            self.counts.stored += store.put(index, samples.encode(sample), self._budget_bytes)
            return (sample,)

    def _wait(self, store: Store, index: int) -> Sample:
        for _ in attempts(self._patience_s, _LONGEST_PAUSE_S):
            if (one := self._stored(store, index) or self._try(store, index, True)) is not None:
                return one[0]
        return self._decode(index)

    def _stored(self, store: Store, index: int) -> tuple[Sample] | None:
        encoded = store.get(index)
        if encoded is None:
            return None
        try:
            sample = samples.decode(encoded)
        except FleetError:  # decoded and stored anew
            return None
        self.counts.taken += 1
        return (sample,)

    def _decode(self, index: int) -> Sample:
        self.counts.decoded += 1
        return self.dataset[index]

    def _check(self, index: int) -> int:
        place = operator.index(index)
        if not -len(self) <= place < len(self):
            raise IndexError(f"index {place} of {len(self)} samples")
        return place % len(self)


def cached(
    dataset: Indexed[Sample],
    *,
    name: str,
    version: str | int = "",
    budget: int | str | None = None,
    patience_s: float = 60.0,
    folder: Path | None = None,
) -> Cached[Sample]:
    """Return the dataset with its samples kept in memory that all jobs of this host share.

    Jobs that give the same `name` and `version`, and a dataset of the same length, share
    samples: change `version` when samples change. What differs from one epoch to the next, like
    random augmentation, belongs behind the cache. `budget` is how large the dataset's cache may
    grow, in bytes or like `"8GB"`. `patience_s` is how long a sample is waited for that another
    process decodes before it is decoded here too.
    """
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise UsageError(
            f"a `{type(dataset).__name__}` has no length or no samples by index",
            hint="cache a dataset with `__len__` and `__getitem__`, below whatever makes a stream of it",
        )
    if not name:
        raise UsageError(
            "a cached dataset needs a `name`", hint="give the same one in all jobs that share it"
        )
    about = About(name, str(version), len(dataset))
    budget_bytes = None if budget is None else read_size(budget)
    return Cached(dataset, CacheFolder.default(folder), about, budget_bytes, patience_s)
