"""`shoestring bench`: what the parts cost and save on this machine.

A file a command; each imports what it measures inside its function, as listing
the commands loads them all. Studies and comparisons with others are not in the
package: they run from a clone, and their former names here say so.
"""

from typing import Any

import typer
from typer.core import TyperGroup

from shoestring.cli.bench import codec, wire
from shoestring.errors import UsageError

MOVED = ("batchnorm", "cache", "fleet", "scale", "split", "train")


class BenchGroup(TyperGroup):
    """The group of the commands below; it names the new home of those that have moved to `benchmarks/`."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in MOVED:
            raise UsageError(
                f"`shoestring bench {cmd_name}` is not part of the package any more",
                hint=f"in a clone of the repository, run `python -m benchmarks.{cmd_name}`",
            )
        return super().get_command(ctx, cmd_name)


app = typer.Typer(
    cls=BenchGroup, help="Measure what the parts cost and save on this machine.", rich_markup_mode="rich"
)


@app.callback()
def _group() -> None:
    """Measure what the parts cost and save on this machine."""


app.command(epilog=codec.EPILOG)(codec.codec)
app.command(epilog=wire.EPILOG)(wire.wire)
