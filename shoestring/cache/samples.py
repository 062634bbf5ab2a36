"""A sample as bytes and back: data alone, of which nothing is ever run.

A sample is a tensor, an array, a number, a string, bytes, None, or a tuple, list or dict of
samples. What comes back equals what went in: same types, same dtypes, same shapes, same bits.
Anything else is refused by name, as is whatever would come back as something else: a subclass,
a tensor on a GPU or one that needs a gradient.

The bytes: CRC-32C of all that follows, length of the header, the header in MessagePack (the
nesting, with dtypes and shapes), then the raw values of each tensor, array and bytes object in
the order of the header, each at a multiple of 16. Read tensors and arrays are writable views of
the buffer they were read from.
"""

import math
import struct
import sys
from typing import Any

import google_crc32c
import msgspec
import numpy as np

from shoestring.errors import FleetError, UsageError

FORMAT = 1  # part of every cache's name: another format is another cache
MAX_DEPTH = 32

_FRAME = struct.Struct("<II")  # checksum, length of the header
_CRC_BYTES = 4
_ALIGNMENT = 16
_ARRAY_KINDS = "?biufcSUmM"  # values that are their own bytes
_PLAIN = (bool, int, float, str)
_CHANGE = (
    "return tensors, arrays, numbers, strings or bytes from the dataset, or tuples, lists and dicts of them"
)


def encode(sample: Any) -> bytearray:
    """Return the bytes of a sample, or raise `UsageError` for one that has none."""
    blobs: list[memoryview] = []
    try:
        header = msgspec.msgpack.encode(_describe(sample, blobs, "sample", 0))
    except (OverflowError, UnicodeEncodeError) as error:
        raise UsageError(f"a sample cannot be cached: {error}", hint=_CHANGE) from None
    starts = []
    size = _FRAME.size + len(header)
    for blob in blobs:
        starts.append(size := _aligned(size))
        size += blob.nbytes
    encoded = bytearray(size)
    encoded[_FRAME.size : _FRAME.size + len(header)] = header
    for start, blob in zip(starts, blobs, strict=True):
        encoded[start : start + blob.nbytes] = blob
    _FRAME.pack_into(encoded, 0, 0, len(header))
    _FRAME.pack_into(encoded, 0, _checksum(encoded), len(header))
    return encoded


def decode(encoded: bytearray) -> Any:
    """Return the sample, or raise `FleetError` for bytes that are not whole."""
    if len(encoded) < _FRAME.size:
        raise _damaged(f"{len(encoded)} bytes")
    checksum, length = _FRAME.unpack_from(encoded)
    if checksum != _checksum(encoded):
        raise _damaged("the checksum does not match")
    header = memoryview(encoded)[_FRAME.size : _FRAME.size + length]
    try:
        return _Reader(encoded, _FRAME.size + length).read(msgspec.msgpack.decode(header))
    except (msgspec.MsgspecError, ValueError, TypeError, LookupError, AttributeError, RuntimeError) as error:
        raise _damaged(f"the header cannot be read: {error}") from None


def _describe(value: Any, blobs: list[memoryview], where: str, depth: int) -> Any:
    """Describe one value for the header; add what is raw to `blobs`."""
    kind = type(value)
    if value is None or kind in _PLAIN:
        return value
    if depth == MAX_DEPTH:
        raise UsageError(f"`{where}` is nested deeper than {MAX_DEPTH}", hint="return flatter samples")
    if kind is tuple or kind is list:
        members = [_describe(one, blobs, f"{where}[{i}]", depth + 1) for i, one in enumerate(value)]
        return [kind.__name__, members]
    if kind is dict and all(type(key) in (str, int) for key in value):
        named = [_describe(one, blobs, f"{where}[{key!r}]", depth + 1) for key, one in value.items()]
        return ["dict", list(value), named]
    if kind is bytes:
        blobs.append(memoryview(value))
        return ["bytes", len(value)]
    if kind is np.ndarray and value.dtype.kind in _ARRAY_KINDS:
        blobs.append(_raw(value))
        return ["array", value.dtype.str, list(value.shape)]
    if isinstance(value, np.generic) and value.dtype.kind in _ARRAY_KINDS:
        blobs.append(_raw(np.asarray(value)))
        return ["scalar", value.dtype.str]
    torch = sys.modules.get("torch")  # a sample that holds a tensor has imported it
    if torch is not None and kind is torch.Tensor:
        _refuse_unlike(value, where, torch)
        flat = value.resolve_conj().resolve_neg().reshape(-1)
        if flat.stride(0) != 1:  # few values, or none, may lie anyhow and still count as contiguous
            flat = flat.clone(memory_format=torch.contiguous_format)
        blobs.append(_raw(flat.view(torch.uint8).numpy()))
        return ["tensor", str(value.dtype).removeprefix("torch."), list(value.shape)]
    raise UsageError(
        f"`{where}` is a `{kind.__module__}.{kind.__qualname__}`, which is not cached", hint=_CHANGE
    )


def _refuse_unlike(tensor: Any, where: str, torch: Any) -> None:
    """A tensor that would not come back as it is."""
    is_plain = tensor.layout is torch.strided and not tensor.is_quantized and not tensor.requires_grad
    if tensor.device.type != "cpu" or not is_plain:
        raise UsageError(
            f"`{where}` is a tensor on `{tensor.device}`, sparse, quantised or with a gradient, "
            "expected a plain one in memory",
            hint="return `tensor.detach().cpu()` from the dataset, and move batches to the GPU afterwards",
        )


def _raw(array: Any) -> memoryview:
    flat: Any = np.ascontiguousarray(array).reshape(-1)
    return memoryview(flat.view(np.uint8)) if flat.size else memoryview(b"")


class _Reader:
    """Reads values in the order in which they were described."""

    def __init__(self, encoded: bytearray, start: int) -> None:
        self._encoded = encoded
        self._at = start

    def read(self, described: Any) -> Any:
        match described:
            case ["tuple", members]:
                return tuple(self.read(one) for one in members)
            case ["list", members]:
                return [self.read(one) for one in members]
            case ["dict", keys, members]:
                return {key: self.read(one) for key, one in zip(keys, members, strict=True)}
            case ["bytes", size]:
                return self._bytes(size)
            case ["array", dtype, shape]:
                return self._array(dtype, shape)
            case ["scalar", dtype]:
                return self._array(dtype, [])[()]
            case ["tensor", dtype, shape]:
                return self._tensor(dtype, shape)
            case [*_]:
                raise ValueError(f"`{described[:1]}`")
        return described

    def _take(self, size: int) -> int:
        """Where the next raw values start, once it is sure that they are there."""
        start = _aligned(self._at)
        if size < 0 or start + size > len(self._encoded):
            raise ValueError(f"{size} bytes at {start} of {len(self._encoded)}")
        self._at = start + size
        return start

    def _bytes(self, size: int) -> bytes:
        start = self._take(size)
        return bytes(memoryview(self._encoded)[start : start + size])

    def _array(self, dtype: str, shape: list[int]) -> Any:
        kind = np.dtype(dtype)
        if kind.kind not in _ARRAY_KINDS:
            raise ValueError(f"dtype `{dtype}`")
        count = math.prod(shape)
        start = self._take(count * kind.itemsize)
        if count * kind.itemsize == 0:
            return np.empty(shape, kind)
        return np.frombuffer(self._encoded, kind, count, start).reshape(shape)

    def _tensor(self, dtype: str, shape: list[int]) -> Any:
        import torch

        kind = getattr(torch, dtype)
        count = math.prod(shape)
        start = self._take(count * kind.itemsize)
        if count == 0:
            return torch.empty(shape, dtype=kind)
        return torch.frombuffer(self._encoded, dtype=kind, count=count, offset=start).reshape(shape)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _checksum(encoded: bytearray) -> int:
    # The library refuses a bytearray, but takes an array over the same memory.
    crc: int = google_crc32c.value(np.frombuffer(encoded, np.uint8)[_CRC_BYTES:])
    return crc


def _damaged(what: str) -> FleetError:
    return FleetError(
        f"a cached sample is damaged: {what}", hint="`shoestring fleet cache clear` removes what is stored"
    )
