"""The command line of a study: `python -m benchmarks.NAME`, run from a clone.

A study is a function whose parameters are its options, as a command of
`shoestring` is; its mistakes are told as theirs are. Options that several
studies have come from `shoestring.cli.bench.options`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import typer

from shoestring.cli import run_app


@dataclass(frozen=True)
class Command:
    """The `main` of a study: called, it runs the study and leaves the process with its exit code."""

    study: Callable[..., Any]
    module: str
    examples: tuple[str, ...]  # the options of calls that the help shows

    def __call__(self, args: list[str] | None = None) -> None:
        run_app(self.app(), self.program, args)

    @property
    def program(self) -> str:
        return f"python -m {self.module}"

    def app(self) -> typer.Typer:
        """Make the Typer application that has this study as its only command."""
        lines = [f"  {self.program} {options}".rstrip() for options in self.examples]
        app = typer.Typer(
            add_completion=False,
            pretty_exceptions_enable=False,
            rich_markup_mode="rich",
            context_settings={"help_option_names": ["-h", "--help"]},
        )
        app.command(epilog="\n".join(["[bold]Examples[/bold]", *lines]))(self.study)
        return app


def say(text: str) -> None:
    """Tell a person how far a study is, on stderr; stdout is for the figures."""
    typer.echo(text, err=True)
