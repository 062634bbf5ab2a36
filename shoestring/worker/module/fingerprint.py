"""A number by which workers find out that they train on the same batch.

It is made of the tensors that a model's forward is given: their types and shapes, and the first
bytes of each. Equal batches have equal numbers on any device; others differ, but for a chance of
one in 2**63. To take it costs little: no more than a few values of a tensor leave its device.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch

TENSOR_BYTES = 1 << 16  # of a tensor; one that is not contiguous is cut to whole rows
_MOST_TENSORS = 64
_MOST_VALUES = 4096  # of any kind that are looked at
_DEEPEST = 16
_END = object()


def fingerprint(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Return a number below 2**63 for what a model is called with; 0 where that holds no tensor's values.

    Tensors may lie in tuples, lists, mappings and dataclasses. Where they are many, the first count.
    """
    found = hashlib.blake2b(digest_size=8)
    is_empty = True
    for tensor in islice(_tensors((args, kwargs)), _MOST_TENSORS):
        for shape, values in _pieces(tensor):
            found.update(f"{tensor.dtype} {shape} {len(values)};".encode())
            found.update(values)
            is_empty = False
    return 0 if is_empty else max(int.from_bytes(found.digest()) >> 1, 1)


def _tensors(whole: Any) -> Iterator[torch.Tensor]:
    """The tensors in a nested value, in its order; it may hold itself."""
    ways = [iter((whole,))]
    for _ in range(_MOST_VALUES):
        while ways and (value := next(ways[-1], _END)) is _END:
            ways.pop()
        if not ways:
            return
        if isinstance(value, torch.Tensor):
            yield value
        elif len(ways) < _DEEPEST:
            ways.append(_items(value))


def _items(value: Any) -> Iterator[Any]:
    if isinstance(value, str | bytes):
        return
    if isinstance(value, list | tuple | set | frozenset):
        yield from value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield getattr(value, field.name, None)
    elif isinstance(value, Mapping) or _is_like_a_mapping(value):
        for key in value.keys():  # noqa: SIM118 - what is only like a mapping need not iterate over keys
            yield value[key]


def _is_like_a_mapping(value: Any) -> bool:
    """Whether it has keys and items, such as a batch of a graph library."""
    keys: Callable[[], Any] | None = getattr(value, "keys", None)
    return callable(keys) and hasattr(value, "__getitem__") and not isinstance(value, type | torch.nn.Module)


def _pieces(tensor: torch.Tensor) -> list[tuple[tuple[int, ...], bytes]]:
    """Shapes and first bytes of a tensor's values, and of where they lie if it is sparse or ragged.

    None where it has no values that can be read.
    """
    try:
        parts = [(tuple(part.shape), _first_bytes(part)) for part in _dense_parts(tensor.detach())]
    except (RuntimeError, TypeError, NotImplementedError):
        return []  # without memory, as on `meta`, or of a class with rules of its own
    return [(shape, values) for shape, values in parts if values]


def _dense_parts(tensor: Any) -> list[torch.Tensor]:
    if tensor.layout is torch.strided:
        return [tensor.int_repr() if tensor.is_quantized else tensor]
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout is torch.jagged:
        return [tensor.offsets(), tensor.values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]


def _first_bytes(tensor: torch.Tensor) -> bytes:
    piece = tensor
    while piece.dim() > 0 and piece.numel() * piece.element_size() > TENSOR_BYTES:
        rows = TENSOR_BYTES * piece.shape[0] // (piece.numel() * piece.element_size())
        piece = piece[:rows] if rows else piece[0]
    flat = piece.resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy())
