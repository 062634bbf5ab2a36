"""`python -m benchmarks.compatibility`: scripts as people write them, beside DDP."""

import os
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.command import Command, say
from shoestring.cli.bench.options import AsJson, Output, check_output, deliver, describe_machine
from shoestring.errors import UsageError

_AGAIN = "may be given again."


def compatibility(
    cases: Annotated[
        list[str] | None,
        typer.Option("--case", metavar="TEXT", help=f"Cases with this in their name; {_AGAIN}"),
    ] = None,
    modes: Annotated[
        list[str] | None, typer.Option("--mode", help=f"wrap-model, wrap-optimizer or local; {_AGAIN}")
    ] = None,
    codecs: Annotated[
        list[str] | None, typer.Option("--codec", metavar="SPEC", help=f"float32 or dct; {_AGAIN}")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Some cases of every kind, as the tests run.")
    ] = False,
    together: Annotated[int, typer.Option(min=1, help="How many cases share a pair of processes.")] = 40,
    folder: Annotated[
        Path | None, typer.Option("--keep", help="Empty folder for what the workers tell, to look at.")
    ] = None,
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """Run short training scripts in two processes, and compare what comes out with DDP's.

    Each row is a script in a mode: `equal` to DDP after 20 steps, `trains`, `refused` with the line
    to write, or `wrong`. All of it takes some minutes.
    """
    import tempfile
    from contextlib import nullcontext
    from dataclasses import asdict

    from benchmarks.compatibility import suite, table
    from benchmarks.compatibility.cases import CASES

    check_output(output)
    chosen = suite.QUICK if quick else tuple(CASES)
    names = [name for name in chosen if not cases or any(text in name for text in cases)]
    settings = [
        setting
        for setting in suite.SETTINGS
        if (not modes or setting.mode in modes) and (not codecs or setting.codec in codecs)
    ]
    if not names or not settings:
        raise UsageError("no case is left", hint="`--case` takes a part of a name in `cases/`")
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="shoestring-") if folder is None else nullcontext(folder) as own:
        rows = suite.measure(names, settings, Path(own).absolute(), say, together=together)
    counts = Counter(row.result for row in rows)
    told = [asdict(row) for row in rows]
    result = {"machine": describe_machine(load_before), "counts": dict(counts), "rows": told}
    deliver(result, output, as_json)
    if not as_json:
        typer.echo("\n".join([*table.lines(told), "", *table.refusals(told)]))
    if counts["wrong"]:
        raise typer.Exit(1)


main = Command(
    compatibility,
    "benchmarks.compatibility",
    examples=(
        "--quick --json",
        "--case Adam --mode wrap-model --codec float32",
        "--output compatibility.json",
    ),
)

if __name__ == "__main__":
    main()
