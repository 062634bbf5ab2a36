"""`shoestring run`: train with several workers, on this machine or on a Ray cluster."""

import json
import os
import secrets
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoestring.cli.lazy import settings
from shoestring.cli.options import given, with_settings
from shoestring.config import CONFIG_VARIABLE, ON_RAY, Launch, Run, gather, of, options
from shoestring.errors import UsageError

if TYPE_CHECKING:
    from shoestring.launch.outcome import Outcome

_EPILOG = """\
[bold]Examples[/bold]
  shoestring run --workers 2 train.py --epochs 3
  shoestring run --workers 4 --shards 2 --codec dct --policy local:16 -m my.training
  shoestring run --workers 2 --checkpoint checkpoints --every 200 train.py
  shoestring run --on ray --workers 8 --checkpoint /shared/checkpoints --every 200 train.py
"""

SUMMARY = "summary.json"
DEFAULTS = {"workers": 2, "name": ""}  # of this command; a name is made up


# Options end where the script begins: what follows is the script's own.
@settings(epilog=_EPILOG, context_settings={"allow_interspersed_args": False})
@with_settings(one for one in options() if one.name != "keys")  # on Ray it makes its own
def run(
    *,
    script: Annotated[str, typer.Argument(help="The training script, or with -m a module.")],
    args: Annotated[list[str] | None, typer.Argument(help="What the script is given.")] = None,
    as_module: Annotated[bool, typer.Option("-m", "--module", help="The script is a module's name.")] = False,
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A TOML file with settings, named as the options here: every = 500, timeout_s = 120. "
            f"Options and variables come before it. ({CONFIG_VARIABLE})",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON summary as the last line.")] = False,
    **named: Any,
) -> None:
    """Run a training script as several workers, on this machine or with `--on ray` on a Ray cluster.

    Each worker is the script in a process of its own, which calls `shoestring.init()`. What they
    print is passed on. When one fails the others are stopped, and its exit code is that of the run.
    """
    from shoestring.checkpoint.resume import AUTO, begin

    named = given(named)
    values = {**DEFAULTS, **gather(named, file=config)}
    wanted, launch = Run(**of(Run, values)), Launch(**of(Launch, values))
    _check(script, as_module, wanted, launch, named)
    name = wanted.name or (f"{Path(script).stem}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}")
    folder = (wanted.folder or Path("shoestring-runs") / name).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"the folder `{folder}` cannot be made: {error.strerror}", hint="give another with `--folder`"
        ) from None
    if wanted.keys is not None:
        _say(f"`keys` is not used: {'a run on Ray makes its own' if launch.on else 'all is on this machine'}")
    checkpoint = wanted.checkpoint
    this = replace(
        wanted,
        name=name,
        folder=folder,
        keys=None,
        checkpoint=checkpoint.absolute() if checkpoint is not None else None,
        resume=begin(str(wanted.resume or AUTO), checkpoint, _say),
    )
    command = [*(["-m"] if as_module else []), script, *(args or [])]
    shards = launch.shards
    if launch.on:
        from shoestring.launch.ray.launcher import run_on_ray

        outcome = run_on_ray(command, this, launch, environment=_values_of(launch.env), say=_say)
    else:
        from shoestring.launch.local import run_local

        shards = shards or 1
        outcome = run_local(command, this, shards=shards, threads=launch.threads_per_worker)
    _report(outcome, this.workers, shards, folder, as_json)
    if outcome.failure is not None:
        raise typer.Exit(outcome.failure.code)


def _check(script: str, as_module: bool, run: Run, launch: Launch, named: Iterable[str]) -> None:
    """Refuse what cannot work before any process is started."""
    from shoestring.codec import registry
    from shoestring.observe.trackers import check as check_tracker
    from shoestring.worker.rounds.policy import make_policy

    if not as_module and not os.path.exists(os.path.join(launch.working_dir or "", script)):
        raise UsageError(
            f"there is no script `{script}`",
            hint="give the path of a Python file, or `-m` and the name of a module",
        )
    if run.codec and run.codec != "auto":
        registry.make(run.codec)
    if run.policy:
        make_policy(run.policy)
    if run.tracker:
        check_tracker(run.tracker, is_used_here=not launch.on)
    if run.tracker == "tensorboard" and launch.on:
        raise UsageError(
            "the files for TensorBoard would stay behind on a Ray node",
            hint="give `--tracker wandb --env WANDB_API_KEY`, or draw the event logs, which come here",
        )
    if run.every and run.checkpoint is None:
        raise UsageError(
            f"`--every {run.every}` is given, but no folder for checkpoints",
            hint="give `--checkpoint DIR` too",
        )
    if not launch.on and any(one.name in named for one in options() if one.about.panel == ON_RAY):
        raise UsageError("an option was given that is for Ray", hint="give `--on ray` too")


def _values_of(variables: Iterable[str]) -> dict[str, str]:
    for name in variables:
        if name not in os.environ:
            raise UsageError(
                f"`--env {name}`: there is no such variable here", hint=f"run `export {name}=...`"
            )
    return {name: os.environ[name] for name in variables}


def _report(outcome: "Outcome", workers: int, shards: int | None, folder: Path, as_json: bool) -> None:
    from shoestring.cli import complain
    from shoestring.observe.events import EventLog

    failure, warning = outcome.failure, outcome.warning()
    summary: dict[str, Any] = {
        "workers": workers,
        "shards": shards,
        "seconds": round(outcome.seconds, 3),
        "exit_codes": outcome.exit_codes,
        "failed": failure.who if failure is not None else None,
        "joined": outcome.joined,
        "warning": warning,
        "folder": str(folder),
    }
    (folder / SUMMARY).write_text(json.dumps(summary, indent=2) + "\n")
    if failure is None:
        _say(f"{workers} workers finished in {outcome.seconds:.1f} s; event logs are in {folder}")
    else:
        said = "".join(f"\n  {line}" for line in failure.last_lines)
        complain(
            f"{failure.who} ended with exit code {failure.code}, so the run was stopped"
            + (f"; its last words:{said}" if said else ", without a word on stderr"),
            f"the event logs are in `{folder}`",
        )
    if warning is not None:
        _say(f"warning: {warning}")
        with EventLog(folder, "launcher") as log:
            log.write("warn", text=warning, is_printed=True)
    if as_json:
        sys.stdout.flush()
        typer.echo(json.dumps(summary))


def _say(text: str) -> None:
    typer.echo(f"shoestring: {text}", err=True)
