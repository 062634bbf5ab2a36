"""`shoestring export`: a checkpoint's model as one safetensors file."""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoestring.cli.lazy import settings
from shoestring.errors import JoinError, SnapshotError, UsageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shoestring.checkpoint.snapshot import Snapshot

_BUFFER = "worker.0.buffer."

_EPILOG = """\
[bold]Examples[/bold]
  shoestring export checkpoints model.safetensors
  shoestring export checkpoints/step-000000200 model.safetensors --force

In Python: [bold]model.load_state_dict(safetensors.torch.load_file("model.safetensors"))[/bold]
"""


@settings(epilog=_EPILOG)
def export(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint, or a folder of them: the newest one.")],
    output: Annotated[Path, typer.Argument(help="The file to write.")],
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Write the model of a checkpoint, under its parameters' own names.

    Buffers, such as BatchNorm's running statistics, are those of worker 0.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    from shoestring.checkpoint.resume import find_snapshot

    if output.exists() and not force:
        raise UsageError(f"`{output}` already exists", hint="give another name, or `--force`")
    snapshot = find_snapshot(checkpoint, lambda text: typer.echo(text, err=True))
    tensors = read_model(snapshot)
    partial = output.with_name(f"{output.name}.{os.getpid()}.partial")
    try:
        save_file(tensors, partial, metadata={"format": "pt"})
        partial.replace(output)
    except (OSError, SafetensorError) as error:
        with suppress(OSError):
            partial.unlink()
        raise UsageError(
            f"`{output}` cannot be written: {error}",
            hint="give a file in a folder that is there, on a disk that has room",
        ) from None
    facts = {
        "file": str(output),
        "step": snapshot.manifest.step,
        "tensors": len(tensors),
        "values": sum(tensor.size for tensor in tensors.values()),
    }
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    typer.echo(str(output))
    typer.echo(
        f"step {facts['step']}: {facts['tensors']} tensors, {facts['values']} values, from {snapshot.folder}",
        err=True,
    )


def read_model(snapshot: "Snapshot") -> "dict[str, NDArray[Any]]":
    """Put the parts of a checkpoint together to tensors, and add the buffers."""
    import msgspec
    import numpy as np

    from shoestring.model.parts import cut
    from shoestring.model.rules import Rule
    from shoestring.model.table import Table, Tensor, check_table

    try:
        table = msgspec.convert(snapshot.manifest.facts.get("table"), tuple[Tensor, ...])
        groups = 1 + max((tensor.group for tensor in table), default=0)
        check_table(Table(table, Rule("average"), groups, 0.0))
    except (msgspec.ValidationError, JoinError) as error:
        raise SnapshotError(
            f"`{snapshot.folder}` does not say which parameters it holds: {error}",
            hint="give a checkpoint that `shoestring` has written",
        ) from None
    parts = cut([tensor.shape for tensor in table])
    for part in parts:  # before anything is allocated for it
        name = f"part.{part.index:05d}.params"
        found = snapshot.spec(name)
        if found != ("float32", (part.size,)):
            raise SnapshotError(
                f"`{name}` in `{snapshot.folder}` is {found[0]} {found[1]}, expected float32 {(part.size,)}",
                hint="export it with the version of shoestring that wrote it",
            )
    tensors: dict[str, NDArray[Any]] = {tensor.name: np.empty(tensor.shape, np.float32) for tensor in table}
    flats = [tensors[tensor.name].reshape(-1) for tensor in table]
    for part in parts:
        values = snapshot.read(f"part.{part.index:05d}.params")
        for piece, start in zip(part.pieces, part.layout.offsets, strict=False):
            flats[piece.tensor][piece.start : piece.stop] = values[start : start + piece.size]
    for name in snapshot.names():
        if name.startswith(_BUFFER):
            tensors[name.removeprefix(_BUFFER)] = snapshot.read(name)
    aliases = snapshot.manifest.facts.get("aliases", {})
    for name, other in aliases.items() if isinstance(aliases, dict) else ():
        if other in tensors:  # a weight that several modules share is saved under each name
            tensors[name] = tensors[other].copy()
    return tensors
