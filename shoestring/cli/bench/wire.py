"""`shoestring bench wire`: rounds of workers and shards against an all-reduce."""

import os
from typing import Annotated

import typer

from shoestring.cli.bench.options import AsJson, Output, Specs, check_output, deliver, describe_machine

EPILOG = """\
[bold]Examples[/bold]
  shoestring bench wire --quick
  shoestring bench wire --codec float32
  shoestring bench wire --json --output wire.json
"""


def wire(
    quick: Annotated[
        bool, typer.Option("--quick", help="A small model and few rounds, within half a minute.")
    ] = False,
    as_json: AsJson = False,
    specs: Specs = None,
    output: Output = None,
) -> None:
    """Measure rounds on this machine against gloo's all-reduce.

    Two workers and two shards, a process each. Slower links, and what a shard and a worker
    cost by themselves: `python -m benchmarks.wire` in a clone of the repository.
    """
    check_output(output)

    from dataclasses import asdict

    from shoestring.bench.codec import report
    from shoestring.bench.link.hosts import Hosts
    from shoestring.bench.wire import rounds as bench
    from shoestring.codec.registry import make

    codecs = [make(spec).spec for spec in specs or bench.CODECS]
    load_before = os.getloadavg()[0]
    with report.show_progress() as progress:
        rows = bench.measure(Hosts(), bench.QUICK if quick else bench.FULL, codecs, progress)
    machine = describe_machine(load_before, quick=quick)
    deliver({"machine": machine, "rows": [asdict(row) for row in rows]}, output, as_json)
    if not as_json:
        bench.show(rows)
