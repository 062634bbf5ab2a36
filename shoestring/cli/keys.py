"""`shoestring keys`: write and list the keys that workers and shards know each other by."""

import json
from pathlib import Path
from typing import Annotated

import typer

_HELP = "\n\n".join(
    (
        "Write and list the keys that workers and shards know each other by.",
        "Between machines, a shard talks only to workers whose public key is in its folder, "
        "and a worker only to shards that hold the secret key `shard`.",
        "A shard's host needs `shard.secret`, and NAME.public of every worker that may join. "
        "A worker's host needs its own NAME.secret, and `shard.public`.",
    )
)

_EPILOG = """\
[bold]Examples[/bold]
  shoestring keys new shard
  shoestring keys new worker-0
  shoestring keys ls --json
"""

app = typer.Typer(help=_HELP, epilog=_EPILOG, rich_markup_mode="rich")

Folder = Annotated[Path, typer.Option("--dir", envvar="SHOESTRING_KEYS", help="Where keys are kept.")]


@app.callback()
def _group() -> None:
    pass


@app.command()
def new(
    name: Annotated[str, typer.Argument(help="Who the key is for: `shard`, or a worker like `worker-3`.")],
    folder: Folder = Path("keys"),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Write NAME.secret (readable by you alone) and NAME.public."""
    from shoestring.wire import keys

    public_key = keys.new(name, folder).public.decode()
    secret, public = keys.secret_file(name, folder), keys.public_file(name, folder)
    if as_json:
        facts = {"name": name, "public_key": public_key, "secret": str(secret), "public": str(public)}
        typer.echo(json.dumps(facts, indent=2))
        return
    typer.echo(f"{secret}\n{public}")
    hosts = "every worker's host" if name == keys.SHARD else "every shard's host"
    typer.echo(f"\nCopy `{public}` to {hosts}; keep the secret where `{name}` runs.", err=True)


@app.command()
def ls(
    folder: Folder = Path("keys"),
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON array, one object a key.")] = False,
) -> None:
    """List names and public keys, and whose secret is here too."""
    from shoestring.wire import keys

    listing = [
        {"name": name, "public_key": key.decode(), "has_secret": keys.secret_file(name, folder).exists()}
        for name, key in keys.load_named(folder).items()
    ]
    if as_json:
        typer.echo(json.dumps(listing, indent=2))
        return
    width = max((len(str(row["name"])) for row in listing), default=0) + 2
    for row in listing:
        note = "  secret is here" if row["has_secret"] else ""
        typer.echo(f"{row['name']:<{width}}{row['public_key']}{note}")
