"""`python -m benchmarks.scale`: rounds of up to 10,000 workers, from a calibrated model."""

import os
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.command import Command
from shoestring.cli.bench.options import AsJson, Output, Specs, check_output, deliver, describe_machine


def scale(
    quick: Annotated[
        bool, typer.Option("--quick", help="Calibrate with up to 4 workers, within a minute.")
    ] = False,
    calibration: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Take the calibration from what `--output` wrote before."),
    ] = None,
    as_json: AsJson = False,
    specs: Specs = None,
    output: Output = None,
) -> None:
    """Simulate rounds of 8 to 10,000 workers at 1 and 25 Gbit/s.

    Real runs of 2 to 16 workers on this machine give the costs of each step, and show how
    far off the model is. Takes about five minutes.
    """
    check_output(output)

    from benchmarks.scale import suite as bench
    from benchmarks.scale.table import show
    from shoestring.bench.codec import report
    from shoestring.codec.registry import make

    effort = bench.QUICK if quick else bench.FULL
    codecs = [make(spec).spec for spec in specs or bench.CODECS]
    load_before = os.getloadavg()[0]
    with report.show_progress() as progress:
        if calibration is None:
            costs, comparisons = bench.measure(effort, codecs, progress)
        else:
            costs, comparisons = bench.load(calibration, specs and codecs)
        rows = bench.sweep(effort, costs, progress)
    result = {
        "machine": describe_machine(load_before, quick=quick),
        **bench.save(costs, comparisons, rows),
    }
    deliver(result, output, as_json)
    if not as_json:
        show(comparisons, rows)


main = Command(
    scale,
    "benchmarks.scale",
    examples=(
        "--quick",
        "--json --output scale.json",
        "--calibration scale.json --codec float32",
    ),
)

if __name__ == "__main__":
    main()
