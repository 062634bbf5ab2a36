"""Options, the machine's description and the one JSON object of every benchmark.

The commands of `shoestring bench` use them, and so do the studies in `benchmarks/`.
Each checks `--output` before it measures, notes the load of the machine before it
adds its own, and delivers one object whose `machine` says where the figures come from.
"""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from shoestring.errors import UsageError

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Data = Annotated[
    Path | None,
    typer.Option(help="Folder with Fashion-MNIST's IDX files. Default: SHOESTRING_DATA, else Debian's."),
]
Output = Annotated[Path | None, typer.Option(help="Write the JSON to this file too.")]
Specs = Annotated[
    list[str] | None, typer.Option("--codec", metavar="SPEC", help="A codec; may be given again.")
]


def check_output(output: Path | None) -> None:
    """Refuse a file that could not be written, before anything is measured."""
    if output is not None and not output.parent.is_dir():
        raise UsageError(f"there is no folder `{output.parent}`", hint="make it, or give another `--output`")


def describe_machine(load_before: float, **more: Any) -> dict[str, Any]:
    """Say where figures come from: this machine, its load before they were taken, and `more`."""
    from shoestring.cli import env

    return {**env.collect(), "load_before": load_before, **more}


def deliver(result: dict[str, Any], output: Path | None, as_json: bool) -> None:
    """Write the result to `output`, and print it where JSON is asked for; a NaN is refused."""
    text = json.dumps(result, indent=2, allow_nan=False)
    if output is not None:
        output.write_text(f"{text}\n")
    if as_json:
        typer.echo(text)
