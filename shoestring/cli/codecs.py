"""`shoestring codecs`: which codecs there are, and what each can be told."""

import json
from typing import Annotated, Any

import typer

# Not one of the registry's: a worker chooses one of those, round by round.
_AUTO = ("auto", "Measures links and steps, and compresses no more than makes training quicker. The default.")


def codecs(
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON array, one object a codec.")] = False,
) -> None:
    """List the codecs and their options, with defaults."""
    from shoestring.codec import registry

    if as_json:
        listing: list[dict[str, Any]] = [{"name": _AUTO[0], "summary": _AUTO[1], "options": []}]
        listing += [
            {
                "name": name,
                "summary": registry.describe(name),
                "options": [
                    {"name": option.name, "type": option.type, "default": option.default}
                    for option in registry.options(name)
                ],
            }
            for name in registry.names()
        ]
        typer.echo(json.dumps(listing, indent=2))
        return

    width = max(len(name) for name in registry.names()) + 2
    typer.echo(f"{_AUTO[0]:<{width}}{_AUTO[1]}")
    for name in registry.names():
        typer.echo(f"{name:<{width}}{registry.describe(name)}")
        texts = ", ".join(option.text for option in registry.options(name))
        if texts:
            typer.echo(f"{'':<{width}}options: {texts}")
    typer.echo("\nWrite a codec with its options as `name:option=value,option=value`.", err=True)
