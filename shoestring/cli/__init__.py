"""The command line: one file a command, loaded when the command is called.

Promises: `--help` and `--version` import neither torch nor Numba nor NumPy; data
goes to stdout and advice to stderr; whatever goes wrong on purpose, a mistyped
option too, reads `error:`, a blank line and `hint:`; Ctrl-C leaves with 130.
"""

import sys
from typing import Annotated, Any

import typer

from shoestring import __version__
from shoestring.cli.lazy import LazyGroup
from shoestring.errors import ShoestringError

_EPILOG = """\
[bold]Examples[/bold]
  shoestring run train.py         train with several workers on this machine
  shoestring codecs               which codecs there are, and their options
  shoestring bench codec --quick  what each costs and saves on this machine
  shoestring keys new worker-0    keys, before more than one machine takes part
  shoestring env --json           what to paste into a bug report
"""

app = typer.Typer(
    name="shoestring",
    cls=LazyGroup,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    epilog=_EPILOG,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"shoestring {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and leave."),
    ] = False,
) -> None:
    """Train PyTorch models on the machines you have."""
    if context.invoked_subcommand is None:
        _show_help(context.get_help())


def main(args: list[str] | None = None) -> None:
    """Run one command and leave the process with its exit code."""
    run_app(app, "shoestring", args)


def run_app(given: typer.Typer, program: str, args: list[str] | None = None) -> None:
    """Run a Typer application under the name `program`, and leave the process with its exit code."""
    try:
        result = given(args, prog_name=program, standalone_mode=False)
    except ShoestringError as error:
        complain(error.message, error.hint)
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    except Exception as error:
        # Typer's own errors: Click's classes in older releases, a private copy of them in newer ones.
        if not hasattr(error, "format_message"):
            raise
        sys.exit(_explain_usage(error, program))
    sys.exit(result if isinstance(result, int) else 0)


def _explain_usage(error: Any, program: str) -> int:
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else program
    if type(error).__name__ == "NoArgsIsHelpError":
        _show_help(error.format_message())
    else:
        complain(error.format_message(), f"run `{command} --help` to see what it takes")
    return int(error.exit_code)


def _show_help(text: str) -> None:
    # With rich, typer prints help when it is asked for it and returns nothing to print.
    if text.strip():
        typer.echo(text)


def complain(message: str, hint: str) -> None:
    """Print an error and what to do about it on stderr."""
    error_word = typer.style("error:", fg="red", bold=True)
    hint_word = typer.style("hint:", fg="cyan", bold=True)
    typer.echo(f"{error_word} {message}\n\n{hint_word} {hint}", err=True)
