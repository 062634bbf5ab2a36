"""Tables and progress for people. Programs read the JSON."""

import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import TextIO

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar
from rich.table import Table

from shoestring.bench.codec.suite import Row
from shoestring.bench.recipe import Progress

_WIDTH = 110
_LINES_A_STAGE = 4


def print_rows(rows: Sequence[Row]) -> None:
    """Print one table a set of gradients."""
    for name, group in groupby(rows, lambda row: row.gradients):
        own = list(group)
        copy_gbps = statistics.median(row.memcpy_gbps for row in own)
        table = _table(f"{name}: {own[0].values:,} values; memcpy {copy_gbps:.1f} GB/s")
        table.add_column("codec", no_wrap=True)
        for heading in ("threads", "bits a\nvalue", "error", "entropy\ngap"):
            table.add_column(heading, justify="right", no_wrap=True)
        for heading in ("encode\nGB/s", "feedback\nGB/s", "decode\nGB/s"):
            table.add_column(heading, justify="right", no_wrap=True)
        for row in own:
            table.add_row(
                row.spec,
                str(row.threads),
                f"{row.bits_per_value:.3g}",
                f"{row.nmse:.2g}",
                "" if row.entropy_gap is None else f"{row.entropy_gap:+.1%}",
                *(f"{rate:.2f}" for rate in (row.encode_gbps, row.feedback_gbps, row.decode_gbps)),
            )
        _console().print(table)


@contextmanager
def show_progress(stream: TextIO | None = None) -> Iterator[Progress]:
    """Yield what shows how far things are: one living line on a terminal, plain lines elsewhere."""
    stream = stream or sys.stderr
    if not stream.isatty():
        yield _plain_lines(stream)
        return
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn())
    # Drawn when something is reported, never by a thread: that would be timed as well.
    with Bar(*columns, console=Console(file=stream), auto_refresh=False, transient=True) as bar:
        task = bar.add_task("", total=None)

        def update(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total, refresh=True)

        yield update


def _plain_lines(stream: TextIO) -> Progress:
    last: tuple[str, int] | None = None

    def write(what: str, done: int, total: int) -> None:
        nonlocal last
        now = (what, _LINES_A_STAGE * done // max(total, 1))
        if now != last:
            last = now
            print(f"{what} ({done} of {total})", file=stream, flush=True)

    return write


def print_table(
    title: str, headings: Sequence[str], rows: Sequence[Sequence[str]], width: int = _WIDTH
) -> None:
    """Print a table whose first column is text and whose others are figures."""
    table = _table(title)
    for place, heading in enumerate(headings):
        table.add_column(heading, justify="left" if place == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    _console(width).print(table)


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE, padding=(0, 1))


def _console(width: int = _WIDTH) -> Console:
    """A cut figure is worth nothing: a narrow terminal, or none, gets the width that tables need."""
    console = Console()
    return console if console.width >= width else Console(width=width)
