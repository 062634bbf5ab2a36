"""`shoestring fleet profile`: what a job costs on each kind of device."""

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoestring.cli.fleet.options import AsJson, Folder, console, devices_of, open_database, say

if TYPE_CHECKING:
    from shoestring.fleet.measure.profile import Profile


def profile(
    names: Annotated[list[str] | None, typer.Argument(metavar="JOB...", help="Default: all jobs.")] = None,
    again: Annotated[bool, typer.Option("--again", help="Measure also what was measured before.")] = False,
    steps: Annotated[int, typer.Option(min=5, max=10_000, help="Steps to time at each batch size.")] = 20,
    folder: Folder = None,
    as_json: AsJson = False,
) -> None:
    """Run some steps of jobs on each kind of device, at a few batch sizes."""
    from shoestring.fleet.engine.local import LocalEngine
    from shoestring.fleet.measure.profile import Profiler
    from shoestring.fleet.run.estimate import load_profiles, measured_profiles

    shown: list[dict[str, Any]] = []
    with open_database(folder) as database, database.hold():
        entries = [database.entry(name) for name in names] if names else database.entries()
        engine = LocalEngine(devices_of(database))
        profiler = Profiler(engine, database.folder / "profile", say, steps=steps)
        try:
            for entry in entries:
                one_each = {device.kind: device for device in engine.devices}
                for kind, device in one_each.items():
                    if entry.job.kinds and kind not in entry.job.kinds:
                        continue
                    if again or kind not in measured_profiles(database, entry.key, engine.devices):
                        found = profiler.profile(entry.job, device)
                        database.save_profile(entry.key, kind, found.to_json())
                for own in load_profiles(database, entry.key, engine.devices).values():
                    shown.append(_facts(entry.job.name, own))
        finally:
            engine.close()
    if as_json:
        typer.echo(json.dumps(shown, indent=2))
    else:
        _show(shown)


def _facts(job: str, own: "Profile") -> dict[str, Any]:
    from dataclasses import asdict

    time_line, memory_line = own.time_line, own.memory_line
    largest = max(sample.batch for sample in own.samples)
    return {
        "job": job,
        "kind": own.kind,
        "predicted_from": own.predicted_from,
        "samples": [asdict(sample) for sample in own.samples],
        "does_not_fit": list(own.does_not_fit),
        "largest_batch": largest,
        "step_s": {
            "at_zero": time_line.at_zero,
            "per_sample": time_line.slope,
            "error": own.step_s(largest)[1],
            "worst_residual": time_line.worst_residual,
        },
        "peak_bytes": {
            "at_zero": memory_line.at_zero,
            "per_sample": memory_line.slope,
            "error": memory_line.error(largest),
            "worst_residual": memory_line.worst_residual,
        },
    }


def _show(shown: list[dict[str, Any]]) -> None:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    for heading in ("job", "kind"):
        table.add_column(heading, no_wrap=True)
    for heading in ("batch", "step\nms", "+-\nms", "memory\nGiB", "busy", "off the\nline", ""):
        table.add_column(heading, justify="right")
    for facts in shown:
        for sample in facts["samples"]:
            table.add_row(
                facts["job"],
                facts["kind"],
                str(sample["batch"]),
                f"{1e3 * sample['step_s']:.3g}",
                f"{1e3 * sample['spread_s']:.2g}",
                f"{sample['peak_bytes'] / 2**30:.2f}",
                f"{sample['busy']:.0%}",
                f"{facts['step_s']['worst_residual']:.0%}",
                f"predicted from {facts['predicted_from']}" if facts["predicted_from"] else "",
            )
    console().print(table)
