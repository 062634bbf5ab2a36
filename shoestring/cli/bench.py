"""`shoestring bench`: what the parts cost and save on this machine."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from shoestring.errors import UsageError

app = typer.Typer(help="Measure what the parts cost and save on this machine.", rich_markup_mode="rich")

_EPILOG = """\
[bold]Examples[/bold]
  shoestring bench codec --quick
  shoestring bench codec --gradients conv,gpt --codec dct:bits=0.1 --codec int8
  shoestring bench codec --json --output codec.json
"""

_WIRE_EPILOG = """\
[bold]Examples[/bold]
  shoestring bench wire --quick
  shoestring bench wire --link loopback --codec float32
  shoestring bench wire --json --output wire.json
"""


@app.callback()
def _group() -> None:
    """Measure what the parts cost and save on this machine."""


@app.command(epilog=_EPILOG)
def codec(
    quick: Annotated[bool, typer.Option("--quick", help="A small set, within about 90 seconds.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    gradients: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...",
            help="Of conv, conv-3, conv-30, gpt, gpt-3, gpt-60, gaussian, laplace, zeros, dense.",
        ),
    ] = None,
    specs: Annotated[
        list[str] | None, typer.Option("--codec", metavar="SPEC", help="A codec; may be given again.")
    ] = None,
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
    data: Annotated[
        Path | None,
        typer.Option(help="Folder with Fashion-MNIST's IDX files. Default: SHOESTRING_DATA, else Debian's."),
    ] = None,
    transform: Annotated[
        bool, typer.Option(help="Also compare bits at an equal error, on captured gradients.")
    ] = True,
    output: Annotated[Path | None, typer.Option(help="Write the JSON to this file too.")] = None,
) -> None:
    """Measure codecs: bits a value, error, and speed against a plain copy of memory.

    Gradients are captured from two small trainings, once, and kept in your cache folder.
    A codec that does not keep its promises is refused, not timed.
    """
    _check_output(output)
    counts = _read_counts(threads)
    result = _measure(quick, gradients, specs, counts, backend, size_mb, data, transform, as_json)
    text = json.dumps(result, indent=2, allow_nan=False)
    if output is not None:
        output.write_text(f"{text}\n")
    if as_json:
        typer.echo(text)


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
    import os
    from dataclasses import asdict

    from shoestring.bench import codec as bench
    from shoestring.bench import gradients as sets
    from shoestring.bench import report
    from shoestring.bench.machine import Memcpy
    from shoestring.bench.transform import ERRORS, compare
    from shoestring.cli import env

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
    machine = {**env.collect(), "load_before": load_before, "memcpy_gbps": memcpy.gbps, "quick": quick}
    return {
        "machine": machine,
        "rows": [asdict(row) for row in rows],
        "transform": [asdict(entry) for entry in comparison],
    }


@app.command(epilog=_WIRE_EPILOG)
def wire(
    quick: Annotated[
        bool, typer.Option("--quick", help="A small model and few rounds, within a minute.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    links: Annotated[
        list[str] | None,
        typer.Option("--link", metavar="LINK", help="Of loopback, 1gbit, 100mbit; may be given again."),
    ] = None,
    specs: Annotated[
        list[str] | None, typer.Option("--codec", metavar="SPEC", help="A codec; may be given again.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Write the JSON to this file too.")] = None,
) -> None:
    """Measure rounds against gloo's all-reduce, and what shards and workers cost.

    Two workers and two shards, a process each. Links other than loopback are network
    namespaces with a limited rate and need root; without it they are left out.
    """
    _check_output(output)
    result = _measure_wire(quick, links, specs)
    text = json.dumps(result, indent=2, allow_nan=False)
    if output is not None:
        output.write_text(f"{text}\n")
    if as_json:
        typer.echo(text)
    else:
        from shoestring.bench import suite

        suite.show(result)


def _measure_wire(quick: bool, links: list[str] | None, specs: list[str] | None) -> dict[str, Any]:
    import os

    from shoestring.bench import hosts, report, suite
    from shoestring.bench import wire as bench
    from shoestring.cli import env
    from shoestring.codec.registry import make

    for link in links or ():
        if link not in hosts.LINKS:
            raise UsageError(f"there is no link `{link}`", hint=f"one of {', '.join(hosts.LINKS)}")
    codecs = [make(spec).spec for spec in specs or bench.CODECS]
    load_before = os.getloadavg()[0]
    with report.show_progress() as progress:
        found = suite.measure(
            bench.QUICK if quick else bench.FULL, tuple(links or hosts.LINKS), codecs, progress
        )
    memcpy_gbps = found.pop("memcpy_gbps")
    machine = {**env.collect(), "load_before": load_before, "memcpy_gbps": memcpy_gbps, "quick": quick}
    return {"machine": machine, **found}


def _check_output(output: Path | None) -> None:
    if output is not None and not output.parent.is_dir():
        raise UsageError(f"there is no folder `{output.parent}`", hint="make it, or give another `--output`")


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


_CACHE_EPILOG = """\
[bold]Examples[/bold]
  shoestring bench cache --quick
  shoestring bench cache --json --output cache.json
"""


@app.command(epilog=_CACHE_EPILOG)
def cache(
    quick: Annotated[bool, typer.Option("--quick", help="Few pictures, within half a minute.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    data: Annotated[
        Path | None,
        typer.Option(help="Folder with Fashion-MNIST's IDX files. Default: SHOESTRING_DATA, else Debian's."),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Write the JSON to this file too.")] = None,
) -> None:
    """Measure two jobs on one dataset: each decoding for itself, and sharing the cache."""
    import os
    from dataclasses import asdict

    from shoestring.bench import cache as bench
    from shoestring.bench import report
    from shoestring.cli import env

    _check_output(output)
    load_before = os.getloadavg()[0]
    with report.show_progress() as progress:
        rows = bench.measure(bench.QUICK if quick else bench.FULL, progress, data)
    machine = {**env.collect(), "load_before": load_before, "quick": quick}
    text = json.dumps({"machine": machine, "rows": [asdict(row) for row in rows]}, indent=2, allow_nan=False)
    if output is not None:
        output.write_text(f"{text}\n")
    if as_json:
        typer.echo(text)
        return
    for row in rows:
        typer.echo(
            f"{row.order} order: {row.private_samples_s:,.0f} samples/s each for itself, "
            f"{row.shared_samples_s:,.0f} sharing ({row.ratio:.2f} x), {row.again_samples_s:,.0f} once stored"
        )


_BATCHNORM_EPILOG = """\
[bold]Examples[/bold]
  shoestring bench batchnorm --quick
  shoestring bench batchnorm --case few-classes --policy every --seeds 1
  shoestring bench batchnorm --json --output batchnorm.json
"""


@app.command(epilog=_BATCHNORM_EPILOG)
def batchnorm(
    quick: Annotated[
        bool, typer.Option("--quick", help="One seed and few steps, within ten minutes.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    names: Annotated[
        list[str] | None,
        typer.Option("--case", metavar="CASE", help="Of few-classes, batch-1, plain; may be given again."),
    ] = None,
    seeds: Annotated[int | None, typer.Option(min=0, max=100, help="How many trainings of each.")] = None,
    policy: Annotated[
        str | None, typer.Option(help="every: exchange every step; local: every 8. Default: both.")
    ] = None,
    delay: Annotated[bool, typer.Option(help="Also time steps on a link with delay.")] = True,
    data: Annotated[
        Path | None,
        typer.Option(help="Folder with Fashion-MNIST's IDX files. Default: SHOESTRING_DATA, else Debian's."),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Write the JSON to this file too.")] = None,
) -> None:
    """Measure what sharing BatchNorm statistics buys and costs, against local and joined ones.

    Eight workers in processes of their own train a small net. Takes most of an hour.
    """
    import os
    from dataclasses import replace

    from shoestring.bench import batchnorm as bench
    from shoestring.bench.batchnorm_cases import find_cases
    from shoestring.cli import env

    _check_output(output)
    effort = bench.QUICK if quick else bench.FULL
    if policy is not None and policy not in bench.POLICIES:
        raise UsageError(f"`--policy {policy}` is not known here", hint="every or local")
    effort = replace(
        effort,
        seeds=effort.seeds if seeds is None else seeds,
        policies=(policy,) if policy else effort.policies,
        delay_batches=effort.delay_batches if delay else (),
    )
    load_before = os.getloadavg()[0]
    found = bench.measure(effort, find_cases(names or []), lambda text: typer.echo(text, err=True), data)
    machine = {**env.collect(), "load_before": load_before, "quick": quick}
    text = json.dumps({"machine": machine, **found}, indent=2, allow_nan=False)
    if output is not None:
        output.write_text(f"{text}\n")
    if as_json:
        typer.echo(text)
    else:
        typer.echo("\n".join(bench.show(found)))


_SPLIT_EPILOG = """\
[bold]Examples[/bold]
  shoestring bench split
  shoestring bench split --slowdown 2 --json --output split.json
"""


@app.command(epilog=_SPLIT_EPILOG)
def split(
    slowdown: Annotated[
        float, typer.Option(min=1, max=20, help="How much slower one of the two devices is.")
    ] = 3.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    output: Annotated[Path | None, typer.Option(help="Write the JSON to this file too.")] = None,
) -> None:
    """Measure one job on two devices of unequal speed, with even shares and with `auto`. Needs root."""
    import os
    import tempfile
    from dataclasses import asdict

    from shoestring.bench.split import run_split
    from shoestring.cli import env

    _check_output(output)
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="shoestring-") as folder:
        rows = run_split(Path(folder), slowdown, lambda text: typer.echo(text, err=True))
    even, auto = rows
    result = {
        "machine": {**env.collect(), "load_before": load_before},
        "slowdown": slowdown,
        "rows": [asdict(row) for row in rows],
        "ratio": auto.samples_per_s / even.samples_per_s,
    }
    text = json.dumps(result, indent=2, allow_nan=False)
    if output is not None:
        output.write_text(f"{text}\n")
    typer.echo(text if as_json else f"{result['ratio']:.2f} times the throughput of even shares")


_FLEET_EPILOG = """\
[bold]Examples[/bold]
  shoestring bench fleet --quick
  shoestring bench fleet --objective makespan --json --output fleet.json
"""


@app.command(epilog=_FLEET_EPILOG)
def fleet(
    quick: Annotated[bool, typer.Option("--quick", help="Small fleets, within seconds.")] = False,
    objective: Annotated[
        str, typer.Option(metavar="jct|makespan|fair|cost", help="What to plan for.")
    ] = "jct",
    seeds: Annotated[int, typer.Option(min=1, max=100, help="How many fleets of each size.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    output: Annotated[Path | None, typer.Option(help="Write the JSON to this file too.")] = None,
) -> None:
    """Measure how long the fleet's decisions take on one core, and their gap to the best possible."""
    import os
    from dataclasses import asdict
    from typing import cast

    from shoestring.bench import fleet as bench
    from shoestring.cli import env

    _check_output(output)
    load_before = os.getloadavg()[0]
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        rows = []
        for jobs, devices in bench.QUICK if quick else bench.FULL:
            typer.echo(f"deciding for {jobs:,} jobs on {devices:,} devices", err=True)
            rows.append(bench.measure(jobs, devices, cast(Any, objective), range(seeds)))
    finally:
        os.sched_setaffinity(0, cores)
    machine = {**env.collect(), "load_before": load_before, "cores": 1, "quick": quick}
    text = json.dumps({"machine": machine, "rows": [asdict(row) for row in rows]}, indent=2, allow_nan=False)
    if output is not None:
        output.write_text(f"{text}\n")
    if as_json:
        typer.echo(text)
        return
    for row in rows:
        typer.echo(
            f"{row.jobs:>7,} jobs {row.devices:>6,} devices  "
            f"{row.decision_s:8.3f} s (most {row.decision_s_max:.3f})  "
            f"gap {row.gap:.3%} (most {row.gap_max:.3%})"
        )
