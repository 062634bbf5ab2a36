"""`shoestring bench wire`: rounds of workers and shards against an all-reduce."""

import os
from typing import Annotated

import typer

from shoestring.cli.bench.options import AsJson, Output, Specs, check_output, deliver, describe_machine
from shoestring.errors import UsageError

EPILOG = """\
[bold]Examples[/bold]
  shoestring bench wire --quick
  shoestring bench wire --link loopback --codec float32
  shoestring bench wire --json --output wire.json
"""


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
    """Measure rounds against gloo's all-reduce.

    Two workers and two shards, a process each. Links other than loopback are network
    namespaces with a limited rate and need root; without it they are left out. What a shard
    and a worker cost by themselves: `python -m benchmarks.wire` in a clone of the repository.
    """
    check_output(output)

    from dataclasses import asdict

    from shoestring.bench.codec import report
    from shoestring.bench.link import hosts
    from shoestring.bench.wire import rounds as bench
    from shoestring.codec.registry import make

    for link in links or ():
        if link not in hosts.LINKS:
            raise UsageError(f"there is no link `{link}`", hint=f"one of {', '.join(hosts.LINKS)}")
    codecs = [make(spec).spec for spec in specs or bench.CODECS]
    load_before = os.getloadavg()[0]
    with report.show_progress() as progress:
        found = bench.measure(links or hosts.LINKS, bench.QUICK if quick else bench.FULL, codecs, progress)
    machine = describe_machine(load_before, quick=quick)
    deliver({"machine": machine, **asdict(found)}, output, as_json)
    if not as_json:
        bench.show(found)
