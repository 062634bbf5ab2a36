"""`shoestring bench codec`: what codecs save, lose and cost on gradients."""

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from shoestring.cli.bench.options import AsJson, Data, Output, Specs, check_output, deliver, describe_machine
from shoestring.errors import UsageError

EPILOG = """\
[bold]Examples[/bold]
  shoestring bench codec --quick
  shoestring bench codec --gradients conv,gpt --codec dct:bits=0.1 --codec int8
  shoestring bench codec --json --output codec.json
"""


def codec(
    quick: Annotated[bool, typer.Option("--quick", help="A small set, within about 90 seconds.")] = False,
    as_json: AsJson = False,
    gradients: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...",
            help="Of conv, conv-3, conv-30, gpt, gpt-3, gpt-60, gaussian, laplace, zeros, dense.",
        ),
    ] = None,
    specs: Specs = None,
    threads: Annotated[
        str | None, typer.Option(metavar="N,...", help="Numbers of threads. Default: 1, and 2 for some.")
    ] = None,
    backend: Annotated[
        str | None, typer.Option(help="What runs `dct`: numba, or the slow definition in numpy.")
    ] = None,
    size_mb: Annotated[
        float | None,
        typer.Option(min=0.001, help="MB a bucket: captured ones are repeated, others made that large."),
    ] = None,
    data: Data = None,
    transform: Annotated[
        bool, typer.Option(help="Also compare bits at an equal error, on captured gradients.")
    ] = True,
    output: Output = None,
) -> None:
    """Measure codecs: bits a value, error, and speed against a plain copy of memory.

    Gradients are captured from two small trainings, once, and kept in your cache folder.
    A codec that does not keep its promises is refused, not timed.
    """
    check_output(output)
    counts = _read_counts(threads)
    result = _measure(quick, gradients, specs, counts, backend, size_mb, data, transform, as_json)
    deliver(result, output, as_json)


def _measure(
    quick: bool,
    gradients: str | None,
    specs: list[str] | None,
    counts: list[int] | None,
    backend: str | None,
    size_mb: float | None,
    data: Path | None,
    transform: bool,
    as_json: bool,
) -> dict[str, Any]:
    from dataclasses import asdict

    from shoestring.bench.codec import gradients as sets
    from shoestring.bench.codec import report
    from shoestring.bench.codec import suite as bench
    from shoestring.bench.codec.transform import ERRORS, compare
    from shoestring.bench.machine import Memcpy

    effort = bench.QUICK if quick else bench.FULL
    names = _read_names(gradients, sets.names(quick)) or list(
        sets.QUICK_NAMES if quick else sets.names(False)
    )
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
    comparison = []
    with report.show_progress() as progress:
        total = len(names) * len(codecs)
        for name in names:
            bucket = sets.load(name, quick=quick, size_mb=size_mb, folder=data, progress=progress)
            for one in codecs:
                progress(f"measuring on `{bucket.name}`", len(rows), total)
                rows.append(bench.measure(one, bucket, memcpy, effort))
            compared = name == "conv" if quick else sets.is_captured(name)
            for error in ERRORS if transform and compared else ():
                progress(f"bits at an equal error on `{bucket.name}`", len(rows), total)
                comparison.append(compare(bucket, error))
    if not as_json:
        report.print_rows(rows)
        if comparison:
            report.print_comparison(comparison)
    return {
        "machine": describe_machine(load_before, memcpy_gbps=memcpy.gbps, quick=quick),
        "rows": [asdict(row) for row in rows],
        "transform": [asdict(entry) for entry in comparison],
    }


def _read_names(text: str | None, known: list[str]) -> list[str]:
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
