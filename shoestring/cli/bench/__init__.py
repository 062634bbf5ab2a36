"""`shoestring bench`: what the parts cost and save on this machine.

A file a command; each imports what it measures inside its function, as listing
the commands loads them all. Studies and comparisons with others are not in the
package: they run from a clone.
"""

import typer

from shoestring.cli.bench import codec, wire

app = typer.Typer(help="Measure what the parts cost and save on this machine.", rich_markup_mode="rich")


@app.callback()
def _group() -> None:
    """Measure what the parts cost and save on this machine."""


app.command(epilog=codec.EPILOG)(codec.codec)
app.command(epilog=wire.EPILOG)(wire.wire)
