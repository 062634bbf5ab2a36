"""`shoestring export`: a checkpoint's model as one safetensors file."""

import json
from pathlib import Path
from typing import Annotated

import typer

from shoestring.cli.lazy import settings
from shoestring.errors import UsageError

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
    from shoestring.checkpoint.export import read_model, write_model
    from shoestring.checkpoint.resume import find_snapshot

    if output.exists() and not force:
        raise UsageError(f"`{output}` already exists", hint="give another name, or `--force`")
    snapshot = find_snapshot(checkpoint, lambda text: typer.echo(text, err=True))
    tensors = read_model(snapshot)
    write_model(tensors, output)
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
