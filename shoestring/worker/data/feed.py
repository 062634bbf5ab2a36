"""`feed`: batches that are on the device before they are asked for.

On a CUDA device some batches are kept ahead: pinned, and copied on a stream of their own while
the device computes. The copy of a batch is waited for by the device, not by the process, when
the batch is handed out; its memory is not given away before the device is done with it.
On other devices a batch is moved when it is its turn.

Batches come in the loader's order, each once, nested as the loader nests them. What is no
tensor stays as it is.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch

from shoestring.errors import UsageError

Batch = TypeVar("Batch")


def feed(loader: Iterable[Batch], device: str | torch.device, *, ahead: int = 2) -> Iterator[Batch]:
    """Yield the loader's batches on a device; with CUDA, `ahead` of them are on their way there."""
    target = torch.device(device)
    if ahead < 1:
        raise UsageError(f"`ahead` is {ahead}", hint="give 1 or more; 2 is usually enough")
    if target.type == "cuda":
        return _feed_ahead(loader, target, ahead)
    return (_map(batch, lambda tensor: tensor.to(target)) for batch in loader)


def _feed_ahead(loader: Iterable[Batch], device: torch.device, ahead: int) -> Iterator[Batch]:
    make_stream: Any = torch.cuda.Stream
    copying = make_stream(device)
    waiting: deque[tuple[Batch, torch.cuda.Event]] = deque()

    def send(batch: Batch) -> None:
        with torch.cuda.stream(copying):
            # Torch keeps the pinned memory until the copy that reads it is done.
            moved = _map(batch, lambda tensor: _pinned(tensor).to(device, non_blocking=True))
            waiting.append((moved, copying.record_event()))

    def hand_out() -> Batch:
        batch, copied = waiting.popleft()
        using = torch.cuda.current_stream(device)
        using.wait_event(copied)
        _map(batch, lambda tensor: _keep_for(tensor, using))
        return batch

    for batch in loader:
        send(batch)
        if len(waiting) > ahead:
            yield hand_out()
    while waiting:
        yield hand_out()


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.pin_memory() if tensor.device.type == "cpu" and not tensor.is_pinned() else tensor


def _keep_for(tensor: torch.Tensor, stream: torch.cuda.Stream) -> torch.Tensor:
    tensor.record_stream(stream)
    return tensor


def _map(batch: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same nesting with every tensor changed."""
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_map(one, change) for one in batch))
    if type(batch) in (tuple, list):
        return type(batch)(_map(one, change) for one in batch)
    if type(batch) is dict:
        return {key: _map(one, change) for key, one in batch.items()}
    return batch
