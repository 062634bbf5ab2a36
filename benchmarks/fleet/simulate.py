"""`python -m benchmarks.fleet.simulate`: Gavel's traces with every objective that the documents quote.

DATA is a folder with `simulation_throughputs.json` and the traces; Gavel's
repository (stanford-futuredata/gavel) has the first trace and the generator of
the others. Each simulation is one call of `shoestring fleet simulate`; they run
one after the other, as `decision_ms` is of this machine.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.command import Command, say
from shoestring.cli.bench.options import AsJson, Output, check_output, deliver

CLUSTER = "v100=12,p100=12,k80=12"
STATIC = ("minimize_makespan.trace", "static_single_120_seed0.trace")
POISSON = "poisson_single_400_lam2000_seed0.trace"
CASES = (("fifo", 0), ("jct", 0), ("jct", 60), ("makespan", 0), ("makespan", 60), ("fair", 0))
SHOWN = ("average_jct_s", "makespan_s", "utilisation", "decision_ms")


def run_simulation(data: Path, trace: str, options: list[str]) -> dict[str, Any]:
    """Simulate one trace through the command line; return its JSON."""
    command = [sys.executable, "-m", "shoestring", "fleet", "simulate", "--json", "--cluster", CLUSTER]
    command += ["--throughputs", str(data / "simulation_throughputs.json"), "--trace", str(data / trace)]
    done = subprocess.run([*command, *options], check=True, stdout=subprocess.PIPE)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def simulate(
    data: Annotated[Path, typer.Argument(help="The folder with Gavel's files.")],
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """Simulate Gavel's traces with every objective and restart cost."""
    check_output(output)
    runs: list[dict[str, Any]] = []
    for objective, cost in CASES:
        for trace in (*STATIC, POISSON):
            if trace == POISSON and objective in ("makespan", "fair"):
                continue  # an end that keeps moving, and a window that fairness does not know
            options = ["--objective", objective, "--restart-cost", str(cost)]
            options += ["--jobs", "150:300"] if trace == POISSON else []
            runs.append(run_simulation(data, trace, options))
            say(f"{trace} {' '.join(options)} { {key: round(runs[-1][key], 3) for key in SHOWN} }")
    rows = [{key: value for key, value in run.items() if key != "machine"} for run in runs]
    deliver({"machine": runs[0]["machine"], "runs": rows}, output, as_json)


main = Command(simulate, "benchmarks.fleet.simulate", examples=("gavel --json --output fleet_simulate.json",))

if __name__ == "__main__":
    main()
