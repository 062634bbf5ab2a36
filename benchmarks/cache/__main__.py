"""`python -m benchmarks.cache`: what two jobs gain from sharing decoded samples."""

import os
from typing import Annotated

import typer

from benchmarks.command import Command
from shoestring.cli.bench.options import AsJson, Data, Output, check_output, deliver, describe_machine


def cache(
    quick: Annotated[bool, typer.Option("--quick", help="Few pictures, within half a minute.")] = False,
    as_json: AsJson = False,
    data: Data = None,
    output: Output = None,
) -> None:
    """Measure two jobs on one dataset: each decoding for itself, and sharing the cache."""
    from dataclasses import asdict

    from benchmarks.cache import suite as bench
    from shoestring.bench.codec import report

    check_output(output)
    load_before = os.getloadavg()[0]
    with report.show_progress() as progress:
        rows = bench.measure(bench.QUICK if quick else bench.FULL, progress, data)
    machine = describe_machine(load_before, quick=quick)
    deliver({"machine": machine, "rows": [asdict(row) for row in rows]}, output, as_json)
    if as_json:
        return
    for row in rows:
        typer.echo(
            f"{row.order} order: {row.private_samples_s:,.0f} samples/s each for itself, "
            f"{row.shared_samples_s:,.0f} sharing ({row.ratio:.2f} x), {row.again_samples_s:,.0f} once stored"
        )


main = Command(cache, "benchmarks.cache", examples=("--quick", "--json --output cache.json"))

if __name__ == "__main__":
    main()
