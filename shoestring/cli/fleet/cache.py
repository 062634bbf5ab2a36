"""`shoestring fleet cache`: the samples that jobs on this host share."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from shoestring.errors import FleetError

_EPILOG = """\
[bold]Examples[/bold]
  shoestring fleet cache ls
  shoestring fleet cache ls --json
  shoestring fleet cache clear imagenet
"""

app = typer.Typer(
    help="Show and clear the decoded samples that jobs on this host share.",
    epilog=_EPILOG,
    rich_markup_mode="rich",
    no_args_is_help=True,
)

Folder = Annotated[
    Path | None,
    typer.Option("--dir", help="Where samples are kept. Default: SHOESTRING_CACHE, else shared memory."),
]


@app.callback()
def _group() -> None:
    pass


@app.command()
def ls(
    folder: Folder = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List datasets: how much of each is stored, and whether a job uses it."""
    from shoestring.cache.folder import CacheFolder
    from shoestring.cache.store import count_samples

    place = CacheFolder.default(folder)
    rows: list[dict[str, Any]] = [
        {
            "name": entry.about.name,
            "version": entry.about.version,
            "samples": entry.about.length,
            "stored": count_samples(place, entry.about),
            "used_bytes": entry.used_bytes,
            "reserved_bytes": entry.about.reserved_bytes,
            "is_used": entry.is_used,
        }
        for entry in place.entries()
    ]
    if as_json:
        facts = {"folder": str(place.path), "limit_bytes": place.limit_bytes, "datasets": rows}
        typer.echo(json.dumps(facts, indent=2))
        return
    width = max((len(_title(row)) for row in rows), default=0)
    for row in rows:
        state = "in use" if row["is_used"] else "idle"
        typer.echo(
            f"{_title(row):<{width}}  {row['stored']:>9,} of {row['samples']:,} samples"
            f"  {row['used_bytes'] / 1e6:>9,.1f} MB  {state}"
        )
    used = sum(row["used_bytes"] for row in rows)
    typer.echo(f"{used / 1e6:,.1f} of {place.limit_bytes / 1e6:,.1f} MB in `{place.path}`", err=True)


@app.command()
def clear(
    name: Annotated[str | None, typer.Argument(help="A dataset's name. Default: all that are idle.")] = None,
    folder: Folder = None,
) -> None:
    """Remove datasets that no job uses. What is in use is left alone."""
    from shoestring.cache.folder import CacheFolder

    place = CacheFolder.default(folder)
    found = [entry.about for entry in place.entries() if name in (None, entry.about.name)]
    if name is not None and not found:
        raise FleetError(f"no dataset `{name}` is cached", hint="`shoestring fleet cache ls` shows which are")
    left = []
    for about in found:
        title = _title({"name": about.name, "version": about.version})
        if place.drop(about):
            typer.echo(title)
        else:
            left.append(title)
    if left and name is not None:
        raise FleetError(f"`{name}` is in use", hint="try again when the jobs that use it have ended")
    for title in left:
        typer.echo(f"`{title}` is in use and was left", err=True)


def _title(row: dict[str, Any]) -> str:
    return f"{row['name']} {row['version']}".rstrip()
