"""`python -m benchmarks.fleet`: how long the fleet's decisions take, and how good they are."""

import os
from typing import Annotated, Any, cast

import typer

from benchmarks.command import Command, say
from shoestring.cli.bench.options import AsJson, Output, check_output, deliver, describe_machine


def fleet(
    quick: Annotated[bool, typer.Option("--quick", help="Small fleets, within seconds.")] = False,
    objective: Annotated[
        str, typer.Option(metavar="jct|makespan|fair|cost", help="What to plan for.")
    ] = "jct",
    seeds: Annotated[int, typer.Option(min=1, max=100, help="How many fleets of each size.")] = 3,
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """Measure how long the fleet's decisions take on one core, and their gap to the best possible."""
    from dataclasses import asdict

    from benchmarks.fleet import decisions as bench

    check_output(output)
    load_before = os.getloadavg()[0]
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        rows = []
        for jobs, devices in bench.QUICK if quick else bench.FULL:
            say(f"deciding for {jobs:,} jobs on {devices:,} devices")
            rows.append(bench.measure(jobs, devices, cast(Any, objective), range(seeds)))
    finally:
        os.sched_setaffinity(0, cores)
    machine = describe_machine(load_before, cores=1, quick=quick)
    deliver({"machine": machine, "rows": [asdict(row) for row in rows]}, output, as_json)
    if as_json:
        return
    for row in rows:
        typer.echo(
            f"{row.jobs:>7,} jobs {row.devices:>6,} devices  "
            f"{row.decision_s:8.3f} s (most {row.decision_s_max:.3f})  "
            f"gap {row.gap:.3%} (most {row.gap_max:.3%})"
        )


main = Command(
    fleet,
    "benchmarks.fleet",
    examples=(
        "--quick",
        "--objective makespan --json --output fleet.json",
    ),
)

if __name__ == "__main__":
    main()
