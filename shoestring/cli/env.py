"""`shoestring env`: what this machine has, for a bug report.

Reads versions from package metadata, so it imports none of the packages it
names and works where one of them is broken.
"""

import json
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer

PACKAGES = ("numpy", "numba", "torch", "triton")


def env(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show versions, processor and memory."""
    facts = collect()
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    versions = {name: version or "not installed" for name, version in facts["packages"].items()}
    rows = {
        "shoestring": facts["shoestring"],
        "python": facts["python"],
        **versions,
        "system": facts["system"],
        "cpu": facts["cpu"]["model"],
        "cores": f"{facts['cpu']['usable_cores']} usable of {facts['cpu']['cores']}",
        "memory": f"{facts['memory_bytes'] / 2**30:.1f} GiB",
    }
    for name, value in rows.items():
        typer.echo(f"{name:<12}{value}")


def collect() -> dict[str, Any]:
    """Gather what `--json` prints; a package that is not installed is None."""
    import psutil

    from shoestring import __version__

    return {
        "shoestring": __version__,
        "python": platform.python_version(),
        "packages": {name: _version_of(name) for name in PACKAGES},
        "system": platform.platform(),
        "cpu": {
            "model": _cpu_model(),
            "cores": os.cpu_count() or 1,
            "usable_cores": len(os.sched_getaffinity(0)),
        },
        "memory_bytes": psutil.virtual_memory().total,
    }


def _version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()
