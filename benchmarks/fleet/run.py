"""`python -m benchmarks.fleet.run`: the plan against FIFO and dealing evenly, in one run.

Three trainings run on two CPU devices of unequal speed. They are profiled once; then each policy runs them
from the start, with the same profiles, one policy after the other on the same machine. Seconds are this
machine's; the ratios travel better. A policy counts only if every job took all its steps. For each life of
a job in the plan's run that had its device alone, the step time its profile predicted is set against what
its event log shows.

A share of a core needs root and a CPU control group.
"""

import os
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.command import Command, say
from shoestring.cli.bench.options import AsJson, Output, check_output, deliver, describe_machine
from shoestring.fleet.engine.devices import parse_cpus
from shoestring.fleet.engine.local import LocalEngine
from shoestring.fleet.jobs import Job
from shoestring.fleet.measure.profile import Profiler
from shoestring.fleet.run.database import Database
from shoestring.fleet.run.estimate import load_profiles
from shoestring.fleet.run.planners import PLANNERS, make_planner
from shoestring.fleet.run.runner import Runner
from shoestring.fleet.run.timeline import draw, intervals
from shoestring.observe.events import Tail

EXAMPLES = Path(__file__).parents[2] / "examples" / "fleet"
LOOK_S = 0.25
ROUND_S = 60.0
PASSED_OVER = 5  # steps of a life that are not timed, as in a profile
FEWEST = 20


def jobs_of(scale: float) -> list[Job]:
    """About 40, 60 and 20 seconds on one core, in this order of arrival."""

    def job(name: str, batch: int, steps: int) -> Job:
        steps = max(60, round(scale * steps))
        arguments = ("--batch", "{batch}", "--steps", str(steps))
        return Job(name, str(EXAMPLES / f"{name}.py"), arguments, (batch,), steps=steps)

    return [job("mlp", 256, 1300), job("text", 16, 1600), job("conv", 128, 1000)]


def run_policy(
    policy: str, folder: Path, jobs: list[Job], profiled: Database, engine: LocalEngine
) -> Database:
    """Run all jobs under one policy, in a fleet of its own."""
    store = Database(folder)
    store.add(jobs)
    for entry in store.entries():
        for kind, data in profiled.profiles(entry.key).items():
            store.save_profile(entry.key, kind, data)
    runner = Runner(store, engine, make_planner(policy, "jct", round_s=ROUND_S), round_s=ROUND_S, say=say)
    with store.hold():
        try:
            while runner.look():
                runner.wait(LOOK_S)
        finally:
            runner.stop()
    return store


def figures(store: Database) -> dict[str, Any]:
    """When the jobs were done, counted from the first start."""
    bars = intervals(store.history())
    began = min(bar.start_at for bar in bars)
    ended = {job.job: job.at - began for job in store.history() if job.state == "done"}
    for entry in store.entries():
        if entry.state != "done" or entry.steps != entry.job.steps:
            raise SystemExit(f"`{entry.job.name}` is {entry.state} after {entry.steps} steps: nothing counts")
    return {
        "total_s": max(ended.values()),
        "average_completion_s": sum(ended.values()) / len(ended),
        "completion_s": ended,
        "lives": [
            {"job": b.job, "device": b.device, "from_s": b.start_at - began, "to_s": b.end_at - began}
            for b in bars
        ],
    }


def predictions(store: Database, engine: LocalEngine) -> list[dict[str, Any]]:
    """Predicted and measured step times of the lives that had their device alone."""
    rows = []
    bars = intervals(store.history())
    for entry in store.entries():
        own = [bar for bar in bars if bar.job == entry.job.name]
        profiles = load_profiles(store, entry.key, engine.devices)
        for bar, steps in zip(own, lives_of(store, entry.job.name), strict=True):
            shared = any(
                o.job != bar.job and o.device == bar.device and o.start_at < bar.end_at > bar.start_at
                and o.end_at > bar.start_at for o in bars
            )  # fmt: skip
            if shared or len(steps) < 2 or steps[-1][0] - steps[0][0] < FEWEST:
                continue
            measured = (steps[-1][1] - steps[0][1]) / (steps[-1][0] - steps[0][0])
            profile, batch = profiles[bar.device], entry.job.batches[0]
            smaller = [sample for sample in profile.samples if sample.batch < batch]
            predicted, error = profile.step_s(batch)
            rows.append(
                {
                    "job": bar.job,
                    "device": bar.device,
                    "steps": steps[-1][0] - steps[0][0],
                    "predicted_ms": 1e3 * predicted,
                    "error_bar_ms": 1e3 * error,
                    "measured_ms": 1e3 * measured,
                    "off": predicted / measured - 1,
                    "measured_at": [sample.batch for sample in smaller] + [batch],
                }
            )
    return rows


def lives_of(store: Database, job: str) -> list[list[tuple[int, float]]]:
    """The steps and times of each life, the first few steps left out."""
    lives: list[list[tuple[int, float]]] = []
    events = Tail(store.job_folder(job)).poll()
    for event in (event for event in events if event["who"] == "worker-0"):
        if event["event"] == "join":
            lives.append([])
        elif event["event"] == "step":
            lives[-1].append((event["step"], event["at"]))
    return [[row for row in life if row[0] - life[0][0] >= PASSED_OVER] for life in lives]


def run(
    cpu: Annotated[str, typer.Option(metavar="NAME=CORES,...", help="The devices.")] = "fast=0,slow=1:0.4",
    scale: Annotated[float, typer.Option(min=0.01, help="How long the jobs are.")] = 1.0,
    folder: Annotated[Path | None, typer.Option(help="Keep the fleets here.")] = None,
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """Run three trainings on two unequal CPU devices by every policy. A share of a core needs root."""
    check_output(output)
    place = folder or Path(tempfile.mkdtemp(prefix="shoestring-fleet-"))
    load_before = os.getloadavg()[0]
    devices = parse_cpus(cpu)
    jobs = jobs_of(scale)
    engine = LocalEngine(devices)
    try:
        with Database(place / "profiled") as profiled:
            profiler = Profiler(engine, place / "profile", say=say)
            for job in jobs:
                for device in devices:
                    found = profiler.profile(job, device)
                    profiled.save_profile(job.key(), device.kind, found.to_json())
            report: dict[str, Any] = {
                "machine": describe_machine(load_before),
                "devices": cpu,
                "jobs": {job.name: {"steps": job.steps, "batch": job.batches[0]} for job in jobs},
                "policies": {},
            }
            for policy in PLANNERS:
                with run_policy(policy, place / policy, jobs, profiled, engine) as store:
                    report["policies"][policy] = figures(store)
                    draw(intervals(store.history()), place / f"{policy}.html")
                    if policy == "plan":
                        report["predictions"] = predictions(store, engine)
                say(f"{policy} {report['policies'][policy]}")
    finally:
        engine.close()
    plan = report["policies"]["plan"]
    report["plan_over"] = {
        policy: {
            key: plan[key] / report["policies"][policy][key] for key in ("total_s", "average_completion_s")
        }
        for policy in PLANNERS[1:]
    }
    report["worst_prediction"] = max(abs(row["off"]) for row in report["predictions"])
    deliver(report, output, as_json)
    if not as_json:
        for policy, ratios in report["plan_over"].items():
            told = ", ".join(f"{ratio:.2f} of its {key}" for key, ratio in ratios.items())
            typer.echo(f"the plan against {policy}: {told}")
        typer.echo(f"worst prediction of a step time: {report['worst_prediction']:.1%} off")


main = Command(run, "benchmarks.fleet.run", examples=("--scale 0.2", "--json --output fleet_run.json"))

if __name__ == "__main__":
    main()
