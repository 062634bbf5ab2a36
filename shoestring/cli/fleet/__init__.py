"""`shoestring fleet`: several jobs on unequal devices."""

from collections.abc import Callable

import typer

from shoestring.cli.fleet import cache, devices, jobs, plan, profile, run, simulate

_EPILOG = """\
[bold]Examples[/bold]
  shoestring fleet devices        what this machine has, and how fast it is
  shoestring fleet add jobs.toml  put jobs in the queue
  shoestring fleet run            profile them, plan, and run them
  shoestring fleet why JOB        why a job is where it is, or what it waits for
  shoestring fleet simulate --help
"""

app = typer.Typer(
    help="Profile devices and jobs, plan which runs where, and run it.",
    epilog=_EPILOG,
    rich_markup_mode="rich",
    no_args_is_help=True,
)


@app.callback()
def _group() -> None:
    pass


app.add_typer(cache.app, name="cache")

_COMMANDS: tuple[Callable[..., None], ...] = (
    devices.devices, jobs.add, jobs.ls, jobs.rm, jobs.why, jobs.logs,
    profile.profile, plan.plan, run.run, run.timeline,
)  # fmt: skip
for _command in _COMMANDS:
    app.command()(_command)
app.command(epilog=simulate.EPILOG)(simulate.simulate)
