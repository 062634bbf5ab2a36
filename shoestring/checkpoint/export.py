"""A checkpoint's model as one file: its parts become the tensors of the model again, as workers hold them.

The parts may lie in the files of any number of shards. What is missing or does not fit the table in
the manifest is refused before memory is taken for it; the output appears when it is whole.
"""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from shoestring.checkpoint.part import tensor_name
from shoestring.checkpoint.snapshot import Snapshot
from shoestring.checkpoint.tensorfile import STAND_INS, write_tensors
from shoestring.errors import JoinError, SnapshotError, UsageError
from shoestring.model.parts import Part, cut
from shoestring.model.precision import NARROW, to_bits
from shoestring.model.rules import Rule
from shoestring.model.table import Table, Tensor, check_table

_BUFFER = "worker.0.buffer."


def read_model(snapshot: Snapshot) -> dict[str, NDArray[Any]]:
    """Put the parts of a checkpoint together to tensors, and add the buffers of worker 0."""
    table = _read_table(snapshot)
    parts = cut([tensor.shape for tensor in table])
    for part in parts:  # before anything is allocated for it
        name = _name_of(part, snapshot)
        found = snapshot.spec(name)
        if found != ("float32", (part.size,)):
            raise SnapshotError(
                f"`{name}` in `{snapshot.folder}` is {found[0]} {found[1]}, expected float32 {(part.size,)}",
                hint="export it with the version of shoestring that wrote it",
            )
    tensors: dict[str, NDArray[Any]] = {tensor.name: np.empty(tensor.shape, np.float32) for tensor in table}
    flats = [tensors[tensor.name].reshape(-1) for tensor in table]
    for part in parts:
        values = snapshot.read(_name_of(part, snapshot))
        for piece, start in zip(part.pieces, part.layout.offsets, strict=False):
            flats[piece.tensor][piece.start : piece.stop] = values[start : start + piece.size]
    for tensor in table:
        tensors[tensor.name] = _cast(tensors[tensor.name], tensor.dtype)
    for name in snapshot.names():
        if name.startswith(_BUFFER):
            tensors[name.removeprefix(_BUFFER)] = snapshot.read(name)
    aliases = snapshot.manifest.facts.get("aliases", {})
    for name, other in aliases.items() if isinstance(aliases, dict) else ():
        if other in tensors:  # a weight that several modules share is saved under each name
            tensors[name] = tensors[other].copy()
    return tensors


def write_model(tensors: dict[str, NDArray[Any]], output: Path) -> None:
    """Write a safetensors file that torch's `load_file` reads, in place of any older one."""
    partial = output.with_name(f"{output.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            write_tensors(file, tensors, {"format": "pt"})
        partial.replace(output)
    except (OSError, SnapshotError) as error:
        with suppress(OSError):
            partial.unlink()
        raise UsageError(
            f"`{output}` cannot be written: {error}",
            hint="give a file in a folder that is there, on a disk that has room",
        ) from None


def _name_of(part: Part, snapshot: Snapshot) -> str:
    """What workers hold of a part: the parameters, unless these are the master of something less precise."""
    held = tensor_name(part.index, "held")
    return held if snapshot.has(held) else tensor_name(part.index, "params")


def _cast(values: NDArray[np.float32], dtype: str) -> NDArray[Any]:
    if dtype not in NARROW:
        return values.astype(dtype, copy=False)
    bits = to_bits(values.reshape(-1), dtype)
    return bits.view(STAND_INS.get(dtype) or np.dtype(dtype)).reshape(values.shape)


def _read_table(snapshot: Snapshot) -> tuple[Tensor, ...]:
    """The tensors that the manifest names, checked as a shard checks those of a worker."""
    try:
        table = msgspec.convert(snapshot.manifest.facts.get("table"), tuple[Tensor, ...])
        groups = 1 + max((tensor.group for tensor in table), default=0)
        check_table(Table(table, Rule("average"), groups, 0.0))
    except (msgspec.ValidationError, JoinError) as error:
        raise SnapshotError(
            f"`{snapshot.folder}` does not say which parameters it holds: {error}",
            hint="give a checkpoint that `shoestring` has written",
        ) from None
    return table
