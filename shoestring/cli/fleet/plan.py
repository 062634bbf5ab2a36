"""`shoestring fleet plan`: which job would run where now, and why."""

import json
from dataclasses import asdict, replace
from typing import Annotated, Any, cast

import typer

from shoestring.cli.fleet.options import AsJson, Folder, devices_of, open_database
from shoestring.errors import UsageError

OBJECTIVES = ("jct", "makespan", "fair", "cost")
Objective = Annotated[
    str,
    typer.Option(metavar="|".join(OBJECTIVES), help="Average completion time, the end of all, or fairness."),
]


def plan(objective: Objective = "jct", folder: Folder = None, as_json: AsJson = False) -> None:
    """Show which job would run where now, and why; start nothing."""
    from shoestring.fleet.allocate.plan import Plan
    from shoestring.fleet.run.estimate import estimate, load_profiles
    from shoestring.fleet.run.planners import make_planner

    check_objective(objective)
    with open_database(folder) as database:
        devices = devices_of(database)
        if database.is_run():  # memory in use now is that of the jobs that are planned
            devices = [replace(device, free_bytes=device.memory_bytes) for device in devices]
        estimates = estimate(
            database.entries(),
            devices,
            lambda entry: load_profiles(database, entry.key, devices),
            seen=database.pairs(),
        )
    planner = make_planner("plan", cast(Any, objective))
    found = planner(estimates, None) if estimates.demands else Plan(())
    reasons = {**estimates.unplanned, **found.reasons}
    if as_json:
        shown = asdict(found) | {"unplanned": dict(estimates.unplanned), "batches": dict(estimates.batches)}
        typer.echo(json.dumps(shown, indent=2, default=str))
        return
    for job, why in reasons.items():
        typer.echo(f"{job}: {why}")


def check_objective(objective: str) -> None:
    if objective not in OBJECTIVES:
        raise UsageError(f"there is no objective `{objective}`", hint=f"one of {', '.join(OBJECTIVES)}")
