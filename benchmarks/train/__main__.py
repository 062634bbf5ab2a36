"""`python -m benchmarks.train`: the same training over the same link, beside what others offer."""

import os
from typing import Annotated, Any

import typer

from benchmarks.command import Command, say
from shoestring.cli.bench.options import AsJson, Data, Output, check_output, deliver, describe_machine

_AGAIN = "may be given again."


def train(
    quick: Annotated[
        bool, typer.Option("--quick", help="Few contestants, one seed, within twenty minutes.")
    ] = False,
    workloads: Annotated[
        list[str] | None, typer.Option("--workload", metavar="NAME", help=f"conv or gpt; {_AGAIN}")
    ] = None,
    contestants: Annotated[
        list[str] | None,
        typer.Option(
            "--contestant", metavar="NAME", help=f"Of ddp, powersgd-2, shoestring-auto, ...; {_AGAIN}"
        ),
    ] = None,
    links: Annotated[
        list[str] | None,
        typer.Option(
            "--link", metavar="LINK", help=f"Of loopback, 1gbit-1ms, 100mbit-10ms, 10mbit-40ms; {_AGAIN}"
        ),
    ] = None,
    hosts: Annotated[list[int] | None, typer.Option(min=2, max=8, help=f"How many hosts; {_AGAIN}")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, max=100, help="How many trainings of each.")] = None,
    search: Annotated[
        bool, typer.Option("--search", help="Try each contestant's learning rates instead.")
    ] = False,
    ablation: Annotated[
        bool, typer.Option("--ablation", help="Leave out one part of our exchange at a time instead.")
    ] = False,
    local: Annotated[
        bool,
        typer.Option("--local", help="With --ablation: keep nothing, or apply answers late, instead."),
    ] = False,
    data: Data = None,
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """Train with every contestant on every link: time to a target, bytes, time spent waiting.

    Hosts are network namespaces joined by links with a rate and a delay; that needs root. All of it
    takes more than an hour.
    """
    from dataclasses import replace

    from benchmarks.train import suite, table

    check_output(output)
    effort = suite.QUICK if quick else suite.FULL
    effort = replace(
        effort,
        workloads=tuple(workloads or effort.workloads),
        contestants=tuple(contestants or effort.contestants),
        links=tuple(links or effort.links),
        hosts=tuple(hosts or effort.hosts),
        seeds=seeds or effort.seeds,
        data=data,
    )
    load_before = os.getloadavg()[0]
    machine = describe_machine(load_before, quick=quick, contestants=suite.versions(effort))

    def keep(found: dict[str, Any]) -> None:
        if output is not None:
            deliver({"machine": machine, **found}, output, as_json=False)

    if search:
        found = {"rates": suite.search(effort, say)}
    elif ablation:
        found = {"ablation": suite.ablate(effort, say, is_local=local)}
    else:
        found = suite.measure(effort, say, keep)
    deliver({"machine": machine, **found}, output, as_json)
    if not as_json:
        typer.echo("\n".join(table.lines(found)))


main = Command(
    train,
    "benchmarks.train",
    examples=(
        "--quick",
        "--workload conv --link 100mbit-10ms --contestant ddp --contestant shoestring-auto",
        "--search --output rates.json",
        "--ablation --workload gpt --output ablation.json",
        "--ablation --local --seeds 1 --output local.json",
        "--json --output train.json",
    ),
)

if __name__ == "__main__":
    main()
