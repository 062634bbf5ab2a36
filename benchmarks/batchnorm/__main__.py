"""`python -m benchmarks.batchnorm`: what sharing BatchNorm statistics buys and costs."""

import os
from typing import Annotated

import typer

from benchmarks.command import Command, say
from shoestring.cli.bench.options import AsJson, Data, Output, check_output, deliver, describe_machine
from shoestring.errors import UsageError


def batchnorm(
    quick: Annotated[
        bool, typer.Option("--quick", help="One seed and few steps, within ten minutes.")
    ] = False,
    as_json: AsJson = False,
    names: Annotated[
        list[str] | None,
        typer.Option("--case", metavar="CASE", help="Of few-classes, batch-1, plain; may be given again."),
    ] = None,
    seeds: Annotated[int | None, typer.Option(min=0, max=100, help="How many trainings of each.")] = None,
    policy: Annotated[
        str | None, typer.Option(help="every: exchange every step; local: every 8. Default: both.")
    ] = None,
    delay: Annotated[bool, typer.Option(help="Also time steps on a link with delay.")] = True,
    data: Data = None,
    output: Output = None,
) -> None:
    """Measure what sharing BatchNorm statistics buys and costs, against local and joined ones.

    Eight workers in processes of their own train a small net. Takes most of an hour.
    """
    from dataclasses import replace

    from benchmarks.batchnorm import suite as bench
    from benchmarks.batchnorm.cases import find_cases

    check_output(output)
    effort = bench.QUICK if quick else bench.FULL
    if policy is not None and policy not in bench.POLICIES:
        raise UsageError(f"`--policy {policy}` is not known here", hint="every or local")
    effort = replace(
        effort,
        seeds=effort.seeds if seeds is None else seeds,
        policies=(policy,) if policy else effort.policies,
        delay_batches=effort.delay_batches if delay else (),
    )
    load_before = os.getloadavg()[0]
    found = bench.measure(effort, find_cases(names or []), say, data)
    deliver({"machine": describe_machine(load_before, quick=quick), **found}, output, as_json)
    if not as_json:
        typer.echo("\n".join(bench.show(found)))


main = Command(
    batchnorm,
    "benchmarks.batchnorm",
    examples=(
        "--quick",
        "--case few-classes --policy every --seeds 1",
        "--json --output batchnorm.json",
    ),
)

if __name__ == "__main__":
    main()
