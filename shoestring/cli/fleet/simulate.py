"""`shoestring fleet simulate`: what an objective would do to a trace of jobs, without a device."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from shoestring.cli.fleet.options import AsJson
from shoestring.errors import UsageError

if TYPE_CHECKING:
    from shoestring.fleet.allocate.plan import Pool

OBJECTIVES = ("jct", "makespan", "fair", "cost", "fifo")
_MOST_DEVICES = 1_000_000

EPILOG = """\
[bold]Examples[/bold]
  shoestring fleet simulate --throughputs T.json --trace A.trace --cluster v100=12,p100=12,k80=12
  shoestring fleet simulate --throughputs T.json --trace A.trace --cluster v100=4 --objective makespan --json
"""


def simulate(
    throughputs: Annotated[Path, typer.Option(help="Speeds, alone and in pairs, in Gavel's format.")],
    trace: Annotated[Path, typer.Option(help="Jobs, in Gavel's format.")],
    cluster: Annotated[str, typer.Option(metavar="KIND=N,...", help="How many devices of each kind.")],
    objective: Annotated[
        str,
        typer.Option(
            metavar="|".join(OBJECTIVES),
            help="Average completion time, end of all, fairness, cost; or Gavel's first come, first served.",
        ),
    ] = "jct",
    packing: Annotated[bool, typer.Option(help="Let two jobs share a device. `fifo` never does.")] = True,
    round_s: Annotated[float, typer.Option("--round", min=1, help="Seconds between decisions.")] = 360.0,
    restart_cost_s: Annotated[
        float, typer.Option("--restart-cost", min=0, help="Seconds a job loses when it starts or moves.")
    ] = 0.0,
    jobs: Annotated[
        str | None,
        typer.Option(metavar="FIRST:END", help="Report on these jobs only, by order of arrival from 0."),
    ] = None,
    cost: Annotated[
        str | None, typer.Option(metavar="KIND=PRICE,...", help="What an hour on a device costs.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="What `fifo` draws with.")] = 0,
    as_json: AsJson = False,
    output: Annotated[Path | None, typer.Option(help="Write the JSON to this file too.")] = None,
) -> None:
    """Run a trace of jobs through an objective, by Gavel's rounds and rules, without a device.

    Figures are of simulated time, but for `decision_ms`: what a decision took here, on average.
    """
    import os

    from shoestring.bench.codec.report import show_progress
    from shoestring.cli import env
    from shoestring.fleet.simulate import simulator as fleet
    from shoestring.fleet.simulate.throughputs import read_throughputs
    from shoestring.fleet.simulate.trace import read_trace

    if objective not in OBJECTIVES:
        raise UsageError(f"there is no objective `{objective}`", hint=f"one of {', '.join(OBJECTIVES)}")
    if output is not None and not output.parent.is_dir():
        raise UsageError(f"there is no folder `{output.parent}`", hint="make it, or give another `--output`")
    if restart_cost_s >= round_s:
        raise UsageError(
            f"`--restart-cost {restart_cost_s:g}` leaves nothing of a round of {round_s:g} s",
            hint="give a longer `--round`",
        )
    pools, watch = read_cluster(cluster, cost), _read_range(jobs)
    settings = fleet.Settings(cast(Any, objective), packing, round_s, restart_cost_s, seed)
    load_before = os.getloadavg()[0]
    speeds, lines = read_throughputs(throughputs), read_trace(trace)
    with show_progress() as progress:
        outcome = fleet.simulate(lines, speeds, pools, settings, watch=watch, progress=progress)
    figures = outcome.figures(sum(pool.count for pool in pools), watch)
    if not as_json:
        for name, figure in figures.items():
            typer.echo(f"{name:<16}{figure:>14,.6g}" if abs(figure) < 1e4 else f"{name:<16}{figure:>14,.0f}")
    result = {
        "machine": {**env.collect(), "load_before": load_before},
        "settings": {
            "throughputs": throughputs.name,
            "trace": trace.name,
            "cluster": {pool.kind: pool.count for pool in pools},
            "objective": objective,
            "packing": packing and objective != "fifo",
            "round_s": round_s,
            "restart_cost_s": restart_cost_s,
            "jobs": jobs,
            "seed": seed,
        },
        **figures,
    }
    text = json.dumps(result, indent=2, allow_nan=False)
    if output is not None:
        output.write_text(f"{text}\n")
    if as_json:
        typer.echo(text)


def read_cluster(text: str, prices: str | None = None) -> "list[Pool]":
    """Read `KIND=N,...`, and the prices beside it."""
    from shoestring.fleet.allocate.plan import Pool

    counts = _read_pairs("--cluster", text, int, "v100=12,k80=4")
    costs = _read_pairs("--cost", prices, float, "v100=2.5,k80=0.4") if prices else {}
    for kind in costs:
        if kind not in counts:
            raise UsageError(
                f"`--cost` names `{kind}`, which is not in the cluster", hint=f"`--cluster {text}`"
            )
    if not 0 < sum(counts.values()) <= _MOST_DEVICES:
        raise UsageError(f"`--cluster {text}` has no devices, or too many", hint=f"1 to {_MOST_DEVICES}")
    return [Pool(kind, count, cost_per_hour=costs.get(kind, 0.0)) for kind, count in counts.items()]


def _read_pairs(option: str, text: str, number: Callable[[str], Any], example: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for part in text.split(","):
        kind, _, figure = part.partition("=")
        try:
            value = number(figure)
        except ValueError:
            value = -1
        if not kind.strip() or not 0 <= value < float("inf") or kind.strip() in found:
            raise UsageError(
                f"`{option} {text}` cannot be read at `{part}`", hint=f"write it like `{option} {example}`"
            )
        found[kind.strip()] = value
    return found


def _read_range(text: str | None) -> range | None:
    if text is None:
        return None
    first, _, end = text.partition(":")
    try:
        found = range(int(first), int(end))
    except ValueError:
        found = range(0)
    if len(found) == 0 or found.start < 0:
        raise UsageError(f"`--jobs {text}` is no range of jobs", hint="write it like `--jobs 150:300`")
    return found
