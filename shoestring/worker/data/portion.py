"""This worker's portion of a sampler, or of a stream, that all workers go through alike."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Any

import torch
from torch.utils.data import IterableDataset, Sampler, SequentialSampler, get_worker_info

from shoestring.worker.data.agreement import AgreedRandom
from shoestring.worker.data.stride import Stride

_UNSIGNED = 1 << 64


class SamplerPortion(Sampler[Any]):
    """This worker's of the indices, or of the batches of indices, that a sampler yields.

    With `is_batching` indices become lists of the stride's size; else what the sampler yields is
    taken as it is. `begin` says which epoch comes next: it decides what is drawn.
    """

    def __init__(self, source: Iterable[Any], stride: Stride, seed: int, *, is_batching: bool) -> None:
        self.source = source
        self.is_batching = is_batching
        self._stride = stride
        self._seed = seed
        self._epoch = self._skip = 0

    def begin(self, epoch: int, skip: int) -> None:
        """Go through this epoch next, behind so many batches."""
        self._epoch, self._skip = epoch, skip

    @property
    def length(self) -> int | None:
        """Batches of an epoch; `None` if the source does not say how much it has."""
        source: Any = self.source
        try:
            own = self._stride.samples(len(source))
        except TypeError:
            return None
        return -(-own // self._stride.size)

    def __len__(self) -> int:
        if self.length is None:
            raise TypeError(f"object of type '{type(self.source).__name__}' has no len()")
        return self.length

    def __iter__(self) -> Iterator[Any]:
        agreed = self._agreed()
        with agreed:
            indices = iter(self.source)

        def take(count: int) -> list[Any]:
            with agreed:
                return list(islice(indices, count))

        for batch in islice(self._stride.batches(take), self._skip, None):
            yield batch if self.is_batching else batch[0]

    def _agreed(self) -> AbstractContextManager[None]:
        if type(self.source) is SequentialSampler:
            return nullcontext()
        inner = getattr(self.source, "sampler", None)
        return AgreedRandom((self._seed % _UNSIGNED, self._epoch), self.source, inner)


class StreamPortion(IterableDataset[Any]):
    """This worker's samples of a stream. Its attributes are the stream's, to read and to set."""

    portion: "_StreamState"

    def __init__(self, source: IterableDataset[Any], stride: Stride, seed: int) -> None:
        vars(self)["portion"] = _StreamState(source, stride, seed)

    def begin(self, epoch: int) -> None:
        """Go through this epoch next, in the loader's processes too."""
        self.portion.epoch.fill_(epoch)

    def __iter__(self) -> Iterator[Any]:
        state, process = self.portion, get_worker_info()
        number = 0 if process is None else process.id
        agreed = AgreedRandom((state.seed % _UNSIGNED, int(state.epoch), number), state.source)
        with agreed:
            samples = iter(state.source)

        def take(count: int) -> list[Any]:
            with agreed:
                return list(islice(samples, count))

        for batch in state.stride.batches(take):
            yield from batch

    def __len__(self) -> int:
        state = self.portion
        return state.stride.samples(len(state.source))

    def __getattr__(self, name: str) -> Any:
        # What is looked for while a copy is made, before it has a source, is not the source's.
        if name == "portion" or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(name)
        return getattr(self.portion.source, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.portion.source, name, value)  # by a loader's `worker_init_fn`, for example


class _StreamState:
    """What a portion of a stream holds itself; each process of a loader has a copy."""

    def __init__(self, source: Any, stride: Stride, seed: int) -> None:
        self.source = source
        self.stride = stride
        self.seed = seed
        epoch: Any = torch.zeros((), dtype=torch.int64)
        self.epoch: torch.Tensor = epoch.share_memory_()  # by the copies
