"""`python -m benchmarks.split`: one job over devices of unequal speed."""

import os
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.command import Command, say
from shoestring.cli.bench.options import AsJson, Output, check_output, deliver, describe_machine


def split(
    slowdown: Annotated[
        float, typer.Option(min=1, max=20, help="How much slower one of the two devices is.")
    ] = 3.0,
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """Measure one job on two devices of unequal speed, with even shares and with `auto`. Needs root."""
    import tempfile
    from dataclasses import asdict

    from benchmarks.split.suite import run_split

    check_output(output)
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="shoestring-") as folder:
        rows = run_split(Path(folder), slowdown, say)
    even, auto = rows
    ratio = auto.samples_per_s / even.samples_per_s
    result = {
        "machine": describe_machine(load_before),
        "slowdown": slowdown,
        "rows": [asdict(row) for row in rows],
        "ratio": ratio,
    }
    deliver(result, output, as_json)
    if not as_json:
        typer.echo(f"{ratio:.2f} times the throughput of even shares")


main = Command(split, "benchmarks.split", examples=("", "--slowdown 2 --json --output split.json"))

if __name__ == "__main__":
    main()
