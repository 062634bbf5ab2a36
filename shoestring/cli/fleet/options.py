"""Options and output that the commands of a fleet share: its folder, its devices, its table."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from shoestring.fleet.engine.devices import Device
    from shoestring.fleet.run.database import Database, Entry

Folder = Annotated[
    Path | None,
    typer.Option(
        "--fleet", envvar="SHOESTRING_FLEET", help="The fleet's folder. Default: in your state folder."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

DEVICES = "devices.json"
_WIDTH = 110


def open_database(folder: Path | None) -> "Database":
    from shoestring.fleet.run.database import Database, default_folder

    return Database(folder or default_folder())


def devices_of(database: "Database") -> "list[Device]":
    """The devices that `fleet devices` wrote down, or what is found now."""
    from shoestring.fleet.engine import devices

    path = database.folder / DEVICES
    return devices.load(path) if path.exists() else devices.find_devices()


def say(text: str) -> None:
    typer.echo(f"shoestring: {text}", err=True)


def console() -> "Console":
    """A table's figures are not cut: a narrow terminal, or none, gets the width they need."""
    from rich.console import Console

    found = Console()
    return found if found.width >= _WIDTH else Console(width=_WIDTH)


def facts_of(entry: "Entry", *, is_run: bool) -> dict[str, Any]:
    """A job as JSON shows it."""
    from dataclasses import asdict

    from shoestring.fleet.run.why import explain

    job = asdict(entry.job)
    state = "stopped" if entry.state == "running" and not is_run else entry.state
    return {
        "name": job.pop("name"),
        "state": state,
        "device": entry.device,
        "batch": entry.batch,
        "steps_done": entry.steps,
        "steps_total": entry.job.total_steps(entry.batch or entry.job.batches[0]),
        "added_at": entry.added_at,
        "ends_at": entry.ends_at,
        "why": explain(entry, is_run=is_run),
        "job": job,
    }


def table_of(entries: "Sequence[Entry]", *, is_run: bool) -> "Table":
    """A table of jobs for people."""
    from rich import box
    from rich.table import Table

    from shoestring.fleet.run.why import duration

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    for heading in ("job", "state", "device"):
        table.add_column(heading, no_wrap=True)
    for heading in ("batch", "steps", "done in"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("why", overflow="fold")
    for entry in entries:
        facts = facts_of(entry, is_run=is_run)
        ends = entry.ends_at if facts["state"] == "running" else None
        table.add_row(
            entry.job.name,
            facts["state"],
            entry.device if facts["state"] == "running" else "",
            str(entry.batch or ""),
            f"{entry.steps}/{facts['steps_total']}",
            "" if ends is None else duration(ends - time.time()),
            entry.note,
        )
    return table
