"""`shoestring demo`: see what the codec is worth on a thin link, on this machine."""

import json
from pathlib import Path
from typing import Annotated

import typer


def demo(
    rate: Annotated[
        float, typer.Option(min=0.1, max=1000, help="The link's rate in Mbit/s, each way.")
    ] = 20.0,
    folder: Annotated[
        Path | None, typer.Option(help="Where logs and charts go. Default: a fresh temporary folder.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Train one small net twice over a slow link between two emulated hosts: float32, then auto.

    Needs no root, no GPU and no network. Example: `shoestring demo --rate 50 --folder demo`
    """
    from dataclasses import asdict

    from shoestring.bench.demo import suite as bench
    from shoestring.cli import env

    place = folder or bench.main_folder()
    place.mkdir(parents=True, exist_ok=True)
    typer.echo(bench.expect(rate), err=True)
    rows = bench.run_demo(place, rate_mbit_s=rate, say=lambda text: typer.echo(text, err=True))
    charts = bench.draw(rows, place)
    if as_json:
        data = [{k: v for k, v in asdict(row).items() if k != "loss"} for row in rows]
        typer.echo(json.dumps({"machine": env.collect(), "rate_mbit_s": rate, "rows": data}, indent=2))
        return
    plain, auto = rows
    typer.echo(f"{'':10}{'seconds':>9}{'MB sent':>10}{'accuracy':>11}")
    for row in rows:
        typer.echo(f"{row.name:10}{row.seconds:9.1f}{row.bytes_sent / 1e6:10.2f}{100 * row.accuracy:10.2f} %")
    typer.echo(
        f"\nauto took {plain.seconds / auto.seconds:.1f} x less time and "
        f"{plain.bytes_sent / auto.bytes_sent:.0f} x fewer bytes for the same steps."
    )
    typer.echo("Charts: " + ", ".join(str(chart) for chart in charts), err=True)
