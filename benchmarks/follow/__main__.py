"""`python -m benchmarks.follow`: what a follower costs the run it reads."""

import os
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.command import Command, say
from shoestring.cli.bench.options import AsJson, Output, check_output, deliver, describe_machine

GOAL = 0.03


def follow(
    seconds: Annotated[float, typer.Option(min=5, help="How long each training takes.")] = 90.0,
    visit: Annotated[float, typer.Option(min=2, help="Seconds that the follower is there, and away.")] = 5.0,
    timer_ms: Annotated[float, typer.Option(min=1, help="What a step's compute takes, by a timer.")] = 50.0,
    values: Annotated[int, typer.Option(min=1, help="Parameters of the model.")] = 2_500_000,
    cpus: Annotated[float, typer.Option(min=0.01, help="Cores that the follower may use.")] = 0.5,
    workers: Annotated[int, typer.Option(min=1, help="How many workers train.")] = 2,
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """Measure a run's steps with and without a follower that reads every round. Its quota needs root."""
    import tempfile
    from dataclasses import asdict

    from benchmarks.follow.suite import measure

    check_output(output)
    load_before = os.getloadavg()[0]
    rows = []
    with tempfile.TemporaryDirectory(prefix="shoestring-") as folder:
        for policy, codec in (("every", "dct"), ("every", "float32"), ("local:4", "dct")):
            row = measure(
                Path(folder) / f"{policy}-{codec}".replace(":", "-"),
                policy=policy, codec=codec, seconds=seconds, visit_s=visit, timer_ms=timer_ms,
                values=values, cpus=cpus, workers=workers, say=say,
            )  # fmt: skip
            rows.append(asdict(row))
            say(str(row))
            if row.other_bits:
                raise SystemExit(f"{row.other_bits} versions were not the run's: nothing counts")
    result = {
        "machine": describe_machine(load_before),
        "workers": workers,
        "values": values,
        "timer_ms": timer_ms,
        "cpus": cpus,
        "rows": rows,
        "goal": GOAL,
        "within_goal": all(row["change"] < GOAL and not any(row["missed"]) for row in rows),
    }
    deliver(result, output, as_json)


main = Command(follow, "benchmarks.follow", examples=("", "--seconds 30 --json --output follow.json"))

if __name__ == "__main__":
    main()
