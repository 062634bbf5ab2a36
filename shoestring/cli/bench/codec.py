"""`shoestring bench codec`: what codecs save, lose and cost on gradients."""

import os
from typing import Annotated

import typer

from shoestring.cli.bench.options import AsJson, Data, Output, Specs, check_output, deliver, describe_machine
from shoestring.errors import UsageError

Gradients = Annotated[
    str | None,
    typer.Option(
        metavar="NAME,...",
        help="Of conv, conv-3, conv-30, gpt, gpt-3, gpt-60, gaussian, laplace, zeros, dense.",
    ),
]
SizeMb = Annotated[
    float | None,
    typer.Option(min=0.001, help="MB a bucket: captured ones are repeated, others made that large."),
]
EPILOG = """\
[bold]Examples[/bold]
  shoestring bench codec --quick
  shoestring bench codec --gradients conv,gpt --codec dct:bits=0.1 --codec int8
  shoestring bench codec --json --output codec.json
"""


def codec(
    quick: Annotated[bool, typer.Option("--quick", help="A small set, within about 90 seconds.")] = False,
    as_json: AsJson = False,
    gradients: Gradients = None,
    specs: Specs = None,
    threads: Annotated[
        str | None, typer.Option(metavar="N,...", help="Numbers of threads. Default: 1, and 2 for some.")
    ] = None,
    backend: Annotated[
        str | None, typer.Option(help="What runs `dct`: numba, or the slow definition in numpy.")
    ] = None,
    size_mb: SizeMb = None,
    data: Data = None,
    output: Output = None,
) -> None:
    """Measure codecs: bits a value, error, and speed against a plain copy of memory.

    Gradients are captured from two small trainings, once, and kept in your cache folder.
    A codec that does not keep its promises is refused, not timed.
    """
    check_output(output)

    from dataclasses import asdict

    from shoestring.bench.codec import gradients as sets
    from shoestring.bench.codec import report
    from shoestring.bench.codec import suite as bench
    from shoestring.bench.machine import Memcpy

    effort = bench.QUICK if quick else bench.FULL
    counts = _read_counts(threads)
    known = sets.names(quick)
    names = read_names(gradients, known) or (sets.QUICK_NAMES if quick else known)
    cores = len(os.sched_getaffinity(0))
    codecs = bench.plan(
        specs or (bench.QUICK_SPECS if quick else bench.FULL_SPECS),
        counts or ([1, 2] if cores > 1 else [1]),
        everywhere=counts is not None,
        backend=backend,
    )
    load_before = os.getloadavg()[0]
    memcpy = Memcpy(effort.copy_mib)
    rows: list[bench.Row] = []
    with report.show_progress() as progress:
        for name in names:
            bucket = sets.load(name, quick=quick, size_mb=size_mb, folder=data, progress=progress)
            for one in codecs:
                progress(f"measuring on `{bucket.name}`", len(rows), len(names) * len(codecs))
                rows.append(bench.measure(one, bucket, memcpy, effort))
    machine = describe_machine(load_before, memcpy_gbps=memcpy.gbps, quick=quick)
    deliver({"machine": machine, "rows": [asdict(row) for row in rows]}, output, as_json)
    if not as_json:
        report.print_rows(rows)


def read_names(text: str | None, known: list[str]) -> list[str]:
    """Split a list of sets of gradients; one that is not known is refused."""
    names = [name.strip() for name in (text or "").split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise UsageError(f"there are no gradients `{name}`", hint=f"one of {', '.join(known)}")
    return names


def _read_counts(text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise UsageError(f"`--threads {text}` is no list of numbers", hint="write it like `--threads 1,2`")
    return counts
