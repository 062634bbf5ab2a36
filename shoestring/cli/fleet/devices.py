"""`shoestring fleet devices`: what this machine has for jobs, and how fast it is."""

import json
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoestring.cli.fleet.options import DEVICES, AsJson, Folder, console, open_database, say

if TYPE_CHECKING:
    from shoestring.fleet.engine.devices import Device
    from shoestring.fleet.run.database import Database


def devices(
    cpu: Annotated[
        str,
        typer.Option(
            metavar="NAME=CORES[:SHARE],...",
            help="CPU devices, such as fast=0-3,slow=4:0.5. Default: sockets, where there is no GPU.",
        ),
    ] = "",
    measure: Annotated[bool, typer.Option(help="Measure how fast each kind is.")] = True,
    folder: Folder = None,
    as_json: AsJson = False,
) -> None:
    """Find this machine's devices, measure them, and keep them for this fleet."""
    from shoestring.fleet.engine.devices import find_devices, save

    with open_database(folder) as database:
        found = find_devices(cpu)
        if measure:
            found = _measured(found, database)
        save(found, database.folder / DEVICES)
    if as_json:
        typer.echo(json.dumps([asdict(device) for device in found], indent=2))
    else:
        _show(found)


def _measured(found: "list[Device]", database: "Database") -> "list[Device]":
    """Measure one device of each kind; it stands for the others."""
    from shoestring.fleet.engine.local import LocalEngine
    from shoestring.fleet.measure.rates import measure_rates

    engine = LocalEngine(found)
    rates: dict[str, Any] = {}
    try:
        for device in found:
            if device.kind not in rates:
                say(f"measuring {device.name}")
                rates[device.kind] = measure_rates(engine, device, database.folder / "rates" / device.name)
    finally:
        engine.close()
    return [replace(device, rates=rates[device.kind]) for device in found]


def _show(found: "list[Device]") -> None:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    for heading in ("device", "kind", "what"):
        table.add_column(heading, no_wrap=True)
    for heading in ("memory\nGiB", "free\nGiB", "copy\nGB/s", "matmul\nGFLOP/s", "upload\nGB/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    for device in found:
        cores = f"cores {','.join(map(str, device.cores))}"
        share = f", {device.share:.0%} of their time" if device.share < 1 else ""
        rates = device.rates
        table.add_row(
            device.name,
            device.kind,
            f"compute capability {device.capability}" if device.is_gpu else cores + share,
            f"{device.memory_bytes / 2**30:.1f}",
            f"{device.free_bytes / 2**30:.1f}",
            "" if rates is None else f"{rates.copy_bytes_s / 1e9:.1f}",
            "" if rates is None else f"{rates.matmul_flop_s / 1e9:.0f}",
            "" if rates is None or rates.upload_bytes_s is None else f"{rates.upload_bytes_s / 1e9:.1f}",
        )
    console().print(table)
