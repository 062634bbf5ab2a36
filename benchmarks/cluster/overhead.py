"""`python -m benchmarks.cluster.overhead`: what Ray costs a step.

The demo's training runs by the local launcher and on a Ray cluster of this machine.

Runs alternate, so that both meet the same machine. All must end with the same parameters, bit for bit,
before a time counts. A step's time is the median of a run's steps behind the first; the figure is the
median over pairs of runs of the ratio between the two. The cluster is there while its run is, with all
that belongs to it, and is on loopback alone.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.command import Command, say
from shoestring.cli.bench.options import AsJson, Output, check_output, deliver, describe_machine

PASSED_OVER = 20  # the first steps of a run, which are slower
GOAL = 1.05
PLACES = {"local": (), "ray": ("--on", "ray://local")}


def run_demo(place: str, folder: Path, workers: int, codec: str) -> dict[str, Any]:
    """Train once; return the hash and the median time of a step."""
    out = folder / place
    out.mkdir(parents=True)
    command = [
        *(sys.executable, "-m", "shoestring", "run", *PLACES[place]),
        *("--workers", str(workers), "--shards", "1", "--threads-per-worker", "1"),
        *("--codec", codec, "--policy", "every:delay=0", "--folder", str(out / "run")),
        *("-m", "shoestring.bench.demo.training", str(out)),
    ]
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode != 0:
        raise SystemExit(f"the run ({place}) failed:\n{done.stderr}")
    found = json.loads((out / "worker-0.json").read_text())
    at = [seconds for seconds, _ in found["loss"]]
    steps = [after - before for before, after in zip(at[PASSED_OVER:], at[PASSED_OVER + 1 :], strict=False)]
    return {"hash": found["hash"], "step_ms": 1e3 * statistics.median(steps), "steps": len(steps)}


def overhead(
    pairs: Annotated[int, typer.Option(min=1, help="How often each launcher runs it.")] = 5,
    workers: Annotated[int, typer.Option(min=1, help="How many workers train.")] = 2,
    codec: Annotated[str, typer.Option(metavar="SPEC", help="The codec of the run.")] = "float32",
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """Time a step of the same training by the local launcher and on Ray, in turns."""
    check_output(output)
    load_before = os.getloadavg()[0]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="shoestring-ray-") as name:
        for pair in range(pairs):
            order = list(PLACES) if pair % 2 == 0 else list(PLACES)[::-1]
            found = {place: run_demo(place, Path(name) / str(pair), workers, codec) for place in order}
            rows.append(
                {"order": order, **found, "ratio": found["ray"]["step_ms"] / found["local"]["step_ms"]}
            )
            say(json.dumps(rows[-1]))
            if len({row[place]["hash"] for row in rows for place in PLACES}) != 1:
                raise SystemExit("the runs did not end with the same parameters: nothing counts")
    ratio = statistics.median(row["ratio"] for row in rows)
    report = {
        "machine": describe_machine(load_before),
        "workers": workers,
        "codec": codec,
        "pairs": rows,
        "ratio": ratio,
        "goal": GOAL,
        "within_goal": ratio <= GOAL,
    }
    deliver(report, output, as_json)
    if not as_json:
        typer.echo(f"a step on Ray takes {ratio:.3f} of one by the local launcher; the goal is {GOAL}")


main = Command(
    overhead, "benchmarks.cluster.overhead", examples=("--pairs 1", "--json --output overhead.json")
)

if __name__ == "__main__":
    main()
