"""Load a command's file when the command is called, not before.

`COMMANDS` names the object behind each command: a function is one command, a
`typer.Typer` a group of them. Listing the commands for `--help` loads them all,
so a command's file imports what is heavy inside its functions.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeVar

import typer
from typer.core import TyperGroup

COMMANDS = {
    "bench": "shoestring.cli.bench:app",
    "codecs": "shoestring.cli.codecs:codecs",
    "demo": "shoestring.cli.demo:demo",
    "env": "shoestring.cli.env:env",
    "export": "shoestring.cli.export:export",
    "fleet": "shoestring.cli.fleet:app",
    "keys": "shoestring.cli.keys:app",
    "run": "shoestring.cli.run:run",
    "serve": "shoestring.cli.serve:serve",
}

Command = TypeVar("Command", bound=Callable[..., Any])

_settings: dict[Callable[..., Any], dict[str, Any]] = {}


def settings(**given: Any) -> Callable[[Command], Command]:
    """Give a command that is a function what Typer's own decorator would: an epilog, context settings."""

    def note(command: Command) -> Command:
        _settings[command] = given
        return command

    return note


class LazyGroup(TyperGroup):
    """The group of all commands in `COMMANDS`."""

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        if cmd_name not in self.commands:
            self.commands[cmd_name] = _load(cmd_name)
        return self.commands[cmd_name]


def _load(name: str) -> Any:
    module, _, attribute = COMMANDS[name].partition(":")
    target = getattr(import_module(module), attribute)
    if isinstance(target, typer.Typer):
        # `get_group`, as `get_command` would fold a group of one command into that command.
        group = typer.main.get_group(target)
        group.name = name
        return group
    single = typer.Typer(add_completion=False, rich_markup_mode="rich")
    single.command(name, **_settings.get(target, {}))(target)
    return typer.main.get_command(single)
