"""`python -m benchmarks.wire`: rounds over slow links, and what shards and workers cost."""

import os
from typing import Annotated

import typer

from benchmarks.command import Command
from shoestring.cli.bench.options import AsJson, Output, Specs, check_output, deliver, describe_machine
from shoestring.errors import UsageError


def wire(
    quick: Annotated[
        bool, typer.Option("--quick", help="A small model and few rounds, within a minute.")
    ] = False,
    as_json: AsJson = False,
    links: Annotated[
        list[str] | None,
        typer.Option("--link", metavar="LINK", help="Of loopback, 1gbit, 100mbit; may be given again."),
    ] = None,
    specs: Specs = None,
    output: Output = None,
) -> None:
    """Measure rounds against gloo's all-reduce, and what shards and workers cost.

    Two workers and two shards, a process each. Links other than loopback are network
    namespaces with a limited rate and need root; without it they are left out.
    """
    check_output(output)

    from dataclasses import asdict

    from benchmarks.wire import suite as bench
    from shoestring.bench.codec import report
    from shoestring.bench.link import hosts
    from shoestring.bench.machine import Memcpy
    from shoestring.bench.wire.rounds import CODECS
    from shoestring.codec.registry import make

    for link in links or ():
        if link not in hosts.LINKS:
            raise UsageError(f"there is no link `{link}`", hint=f"one of {', '.join(hosts.LINKS)}")
    codecs = [make(spec).spec for spec in specs or CODECS]
    load_before = os.getloadavg()[0]
    memcpy = Memcpy(bench.COPY_MIB)
    with report.show_progress() as progress:
        found = bench.measure(
            bench.QUICK if quick else bench.FULL, links or hosts.LINKS, codecs, memcpy, progress
        )
    machine = describe_machine(load_before, memcpy_gbps=memcpy.gbps, quick=quick)
    deliver({"machine": machine, **asdict(found)}, output, as_json)
    if not as_json:
        bench.show(found)


main = Command(
    wire,
    "benchmarks.wire",
    examples=("--quick", "--link loopback --codec float32", "--json --output wire.json"),
)

if __name__ == "__main__":
    main()
