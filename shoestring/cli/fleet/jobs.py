"""`shoestring fleet add|ls|rm|why|logs`: the jobs of a fleet."""

import json
import shutil
from pathlib import Path
from typing import Annotated

import typer

from shoestring.cli.fleet.options import AsJson, Folder, console, facts_of, open_database, say, table_of
from shoestring.errors import FleetError

_LOG_BYTES = 1 << 16

Name = Annotated[str, typer.Argument(metavar="JOB", help="A job's name: see `shoestring fleet ls`.")]


def add(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="TOML or Python files of jobs.")],
    folder: Folder = None,
    as_json: AsJson = False,
) -> None:
    """Put the jobs of some files in the queue, all of them or none."""
    from shoestring.fleet.jobs import read_jobs

    jobs = [job for file in files for job in read_jobs(file)]
    with open_database(folder) as database:
        database.add(jobs)
    names = [job.name for job in jobs]
    if as_json:
        typer.echo(json.dumps({"added": names}))
    else:
        typer.echo("\n".join(names))
        say("profile them with `shoestring fleet profile`, or run them: `shoestring fleet run`")


def ls(folder: Folder = None, as_json: AsJson = False) -> None:
    """List the jobs, in the order they were added."""
    with open_database(folder) as database:
        entries, is_run = database.entries(), database.is_run()
    if as_json:
        typer.echo(json.dumps([facts_of(entry, is_run=is_run) for entry in entries], indent=2))
    else:
        console().print(table_of(entries, is_run=is_run))


def rm(
    names: Annotated[list[str], typer.Argument(metavar="JOB...", help="Jobs to forget.")],
    folder: Folder = None,
) -> None:
    """Remove jobs with their logs and checkpoints; one that runs is ended."""
    with open_database(folder) as database:
        for name in names:
            database.entry(name)
        for name in names:
            database.unwant(name)
        try:
            with database.hold():
                for name in names:
                    database.forget(name)
                    shutil.rmtree(database.job_folder(name), ignore_errors=True)
        except FleetError:
            say("the process that runs this fleet removes them")


def why(name: Name, folder: Folder = None, as_json: AsJson = False) -> None:
    """Say why a job is where it is, or what it waits for."""
    from shoestring.fleet.run.why import explain

    with open_database(folder) as database:
        entry, is_run = database.entry(name), database.is_run()
    typer.echo(
        json.dumps(facts_of(entry, is_run=is_run), indent=2) if as_json else explain(entry, is_run=is_run)
    )


def logs(name: Name, folder: Folder = None) -> None:
    """Print the end of what a job printed, over all its lives."""
    with open_database(folder) as database:
        database.entry(name)
        path = database.job_folder(name) / "output.log"
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _LOG_BYTES))
            typer.echo(file.read(_LOG_BYTES).decode(errors="replace"), nl=False)
    except OSError:
        raise FleetError(
            f"job `{name}` has printed nothing yet", hint=f"see `shoestring fleet why {name}`"
        ) from None
