"""`python -m benchmarks.evenness`: how evenly shards share a model."""

import typer

from benchmarks.command import Command
from shoestring.cli.bench.options import AsJson, Output, check_output, deliver


def evenness(as_json: AsJson = False, output: Output = None) -> None:
    """Cut ResNet-18, ResNet-50, VGG-16 and GPT-2 into parts, and spread them over 2 to 16 shards.

    It takes shapes alone, and the same figures come out on every machine: what the shard with the most
    values holds over the mean.
    """
    from dataclasses import asdict

    from benchmarks.evenness.suite import SHARDS, measure

    check_output(output)
    rows = measure()
    deliver({"rows": [asdict(row) for row in rows]}, output, as_json)
    if not as_json:
        typer.echo("model       parts  max/mean on " + " ".join(f"{shards:>5}" for shards in SHARDS))
        for model in dict.fromkeys(row.model for row in rows):
            own = [row for row in rows if row.model == model]
            figures = " ".join(f"{row.max_over_mean:.3f}" for row in own)
            typer.echo(f"{model:<11} {own[0].parts:>5}              {figures}")


main = Command(
    evenness,
    "benchmarks.evenness",
    examples=("", "--json", "--output evenness.json"),
)

if __name__ == "__main__":
    main()
