"""Simulate Gavel's traces with every objective that the documents quote, through the command line.

    python benchmarks/fleet/simulate.py DATA --output benchmarks/results/fleet_simulate.json

DATA is a folder with `simulation_throughputs.json` and the traces; Gavel's
repository (stanford-futuredata/gavel) has the first trace and the generator of
the others. Runs one after the other, as `decision_ms` is of this machine.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

CLUSTER = "v100=12,p100=12,k80=12"
STATIC = ("minimize_makespan.trace", "static_single_120_seed0.trace")
POISSON = "poisson_single_400_lam2000_seed0.trace"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    runs = []
    for objective, cost in (
        ("fifo", 0),
        ("jct", 0),
        ("jct", 60),
        ("makespan", 0),
        ("makespan", 60),
        ("fair", 0),
    ):
        for trace in (*STATIC, POISSON):
            if trace == POISSON and objective in ("makespan", "fair"):
                continue  # an end that keeps moving, and a window that fairness does not know
            options = ["--objective", objective, "--restart-cost", str(cost)]
            options += ["--jobs", "150:300"] if trace == POISSON else []
            runs.append(simulate(args.data, trace, options))
    if args.output:
        machine = runs[0]["machine"]
        rows = [{key: value for key, value in run.items() if key != "machine"} for run in runs]
        args.output.write_text(json.dumps({"machine": machine, "runs": rows}, indent=2) + "\n")


def simulate(data: Path, trace: str, options: list[str]) -> dict:
    command = [sys.executable, "-m", "shoestring", "fleet", "simulate", "--json", "--cluster", CLUSTER]
    command += [
        "--throughputs",
        str(data / "simulation_throughputs.json"),
        "--trace",
        str(data / trace),
        *options,
    ]
    found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    figures = {
        key: round(found[key], 3) for key in ("average_jct_s", "makespan_s", "utilisation", "decision_ms")
    }
    print(trace, *options, figures, flush=True)
    return found


if __name__ == "__main__":
    main()
