"""`shoestring fleet run` and `timeline`: execute the plan, here or on Ray, and see how it went."""

import json
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from shoestring.cli.fleet.options import AsJson, Folder, devices_of, facts_of, open_database, say, table_of
from shoestring.cli.fleet.plan import Objective, check_objective

if TYPE_CHECKING:
    from shoestring.fleet.engine.base import Engine
    from shoestring.fleet.run.database import Database
    from shoestring.fleet.run.runner import Runner

_LOOK_S = 0.25


def run(
    objective: Objective = "jct",
    planner_name: Annotated[
        str,
        typer.Option(
            "--planner",
            metavar="plan|fifo|even",
            help="The allocator's plan, or a yardstick beside it.",
        ),
    ] = "plan",
    round_s: Annotated[float, typer.Option("--round", min=1, help="Seconds between decisions.")] = 60.0,
    forever: Annotated[bool, typer.Option("--forever", help="Wait for jobs to be added.")] = False,
    grace_s: Annotated[
        float, typer.Option("--grace", min=0, help="Seconds that jobs get to their checkpoint after Ctrl-C.")
    ] = 60.0,
    on: Annotated[
        str,
        typer.Option(
            metavar="ray[://HOST:PORT]",
            help="Run on the nodes of this Ray cluster; the fleet's folder must be reachable from all.",
        ),
    ] = "",
    allow_open: Annotated[
        bool, typer.Option("--allow-open-ray", help="Use a Ray cluster that asks nobody for a token.")
    ] = False,
    folder: Folder = None,
    as_json: AsJson = False,
) -> None:
    """Run all jobs on this machine, or with `--on ray` on a Ray cluster, until they are done.

    Jobs that were not profiled are profiled first. Ctrl-C stops all jobs at their next
    checkpoint; a later `run` goes on from there.
    """
    from shoestring.fleet.measure.profile import Profiler
    from shoestring.fleet.run.planners import make_planner
    from shoestring.fleet.run.runner import Runner
    from shoestring.launch.signals import signals_as_exceptions

    check_objective(objective)
    planner = make_planner(planner_name, cast(Any, objective), round_s=round_s)
    with open_database(folder) as database, database.hold():
        for name in database.recover():
            say(f"`{name}` goes on from its checkpoint")
        with _engine(database, on, allow_open=allow_open) as engine:
            profiler = Profiler(engine, database.folder / "profile", say)
            runner = Runner(database, engine, planner, profiler, round_s=round_s, say=say)
            with signals_as_exceptions():
                try:
                    _loop(runner, database, forever=forever)
                finally:
                    runner.stop(grace_s)
        entries = database.entries()
    if as_json:
        typer.echo(json.dumps([facts_of(entry, is_run=False) for entry in entries], indent=2))
    if any(entry.state == "failed" for entry in entries):
        raise typer.Exit(1)


@contextmanager
def _engine(database: "Database", on: str, *, allow_open: bool) -> Iterator["Engine"]:
    """The engine to run on; closed afterwards."""
    if not on:
        from shoestring.fleet.engine.local import LocalEngine

        with closing(LocalEngine(devices_of(database))) as engine:
            yield engine
        return
    from shoestring.fleet.engine.ray import RayEngine
    from shoestring.launch.ray.cluster import open_cluster, parse_address

    cluster = open_cluster(parse_address(on), allow_open=allow_open)
    with closing(cluster), closing(RayEngine(cluster.ray, say)) as engine:
        yield engine


def timeline(
    output: Annotated[Path, typer.Argument(help="The page to write.")] = Path("fleet.html"),
    folder: Folder = None,
    as_json: AsJson = False,
) -> None:
    """Draw which job was on which device when."""
    from dataclasses import asdict

    from shoestring.fleet.run.timeline import draw, intervals

    with open_database(folder) as database:
        found = intervals(database.history())
    if as_json:
        typer.echo(json.dumps([asdict(one) for one in found], indent=2))
    else:
        typer.echo(str(draw(found, output)))


def _loop(runner: "Runner", database: "Database", *, forever: bool) -> None:
    from rich.console import Console
    from rich.live import Live

    is_shown = sys.stderr.isatty()
    console = Console(stderr=True)
    said: dict[str, tuple[str, str]] = {}
    with Live(console=console, auto_refresh=False) if is_shown else nullcontext() as live:
        while runner.look() or forever:
            entries = database.entries()
            if live is not None:
                live.update(table_of(entries, is_run=True), refresh=True)
            else:
                for entry in entries:
                    now = (entry.state, entry.device)
                    if said.get(entry.job.name) != now:
                        said[entry.job.name] = now
                        say(f"{entry.job.name}: {entry.state} {entry.device} ({entry.note})")
            runner.wait(_LOOK_S)
