"""Options of a command that are settings of `config.py`: one for each field, made by a loop."""

import inspect
from collections.abc import Callable, Iterable
from typing import Annotated, Any, TypeVar

import typer

from shoestring.config import Setting

Command = TypeVar("Command", bound=Callable[..., Any])


def with_settings(settings: Iterable[Setting]) -> Callable[[Command], Command]:
    """Give a command an option for each setting.

    The command takes them as keyword arguments; one that was not given is `None`. The environment
    and the defaults are not looked at here: `config.gather` does that.
    """

    def add(command: Command) -> Command:
        signature = inspect.signature(command)
        own = [one for one in signature.parameters.values() if one.kind is not one.VAR_KEYWORD]
        made = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
            for name, annotation in map(_option, settings)
        ]
        every: Any = command
        every.__signature__ = signature.replace(parameters=[*own, *made])
        every.__annotations__ = {
            "return": command.__annotations__["return"],
            **{one.name: one.annotation for one in (*own, *made)},
        }
        return command

    return add


def given(options: dict[str, Any]) -> dict[str, Any]:
    """Those of the options that were given."""
    found = {name: value for name, value in options.items() if value is not None}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}


def _option(setting: Setting) -> tuple[str, Any]:
    """The name and the annotation of a setting's option."""
    about = setting.about
    is_number = setting.kind in (int, float)
    default = "" if "Default" in about.help else setting.text(setting.default or None)
    option = typer.Option(
        setting.option,
        min=about.least if is_number else None,
        max=about.most if is_number and about.most < float("inf") else None,
        metavar=about.metavar,
        rich_help_panel=about.panel,
        help=f"{about.help}{default and f' Default: {default}.'} ({setting.variable})",
    )
    kind: Any = list[str] if setting.kind is tuple else setting.kind
    return setting.name, Annotated[kind | None, option]
