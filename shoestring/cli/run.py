"""`shoestring run`: train with several workers, on this machine or on a Ray cluster."""

import json
import os
import secrets
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoestring.cli.lazy import settings
from shoestring.errors import UsageError

if TYPE_CHECKING:
    from shoestring.launch.local import Outcome

_EPILOG = """\
[bold]Examples[/bold]
  shoestring run --workers 2 train.py --epochs 3
  shoestring run --workers 4 --shards 2 --codec dct --policy local:16 -m my.training
  shoestring run --workers 2 --checkpoint checkpoints --every 200 train.py
  shoestring run --on ray --workers 8 --checkpoint /shared/checkpoints --every 200 train.py
"""

SUMMARY = "summary.json"
_ON_RAY = "On Ray"


# Options end where the script begins: what follows is the script's own.
@settings(epilog=_EPILOG, context_settings={"allow_interspersed_args": False})
def run(
    script: Annotated[str, typer.Argument(help="The training script, or with -m a module.")],
    args: Annotated[list[str] | None, typer.Argument(help="What the script is given.")] = None,
    workers: Annotated[int, typer.Option(min=1, max=1024, help="How many processes train.")] = 2,
    shards: Annotated[
        int | None,
        typer.Option(min=1, max=256, help="How many hold the parameters. Default: 1; on Ray, one a node."),
    ] = None,
    codec: Annotated[
        str, typer.Option(envvar="SHOESTRING_CODEC", help="How gradients travel: see `shoestring codecs`.")
    ] = "",
    policy: Annotated[
        str,
        typer.Option(
            envvar="SHOESTRING_POLICY", help="When workers exchange: every, local:16, bounded:4, async."
        ),
    ] = "",
    checkpoint: Annotated[
        Path | None, typer.Option(envvar="SHOESTRING_CHECKPOINT", help="Folder of the run's checkpoints.")
    ] = None,
    every: Annotated[
        int, typer.Option(envvar="SHOESTRING_EVERY", min=0, help="Rounds between checkpoints.")
    ] = 0,
    resume: Annotated[
        str,
        typer.Option(
            envvar="SHOESTRING_RESUME",
            metavar="auto|DIR|no",
            help="Go on from the newest checkpoint, a given one, or none.",
        ),
    ] = "auto",
    folder: Annotated[
        Path | None, typer.Option(help="Where event logs go. Default: shoestring-runs/NAME.")
    ] = None,
    name: Annotated[str, typer.Option(help="The run's name. Default: the script's, and the time.")] = "",
    threads: Annotated[
        int | None, typer.Option("--threads-per-worker", min=1, help="Default: they share the cores.")
    ] = None,
    as_module: Annotated[bool, typer.Option("-m", "--module", help="The script is a module's name.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON summary as the last line.")] = False,
    on: Annotated[
        str,
        typer.Option(
            metavar="ray[://HOST:PORT]",
            rich_help_panel=_ON_RAY,
            help="Run on this Ray cluster; `ray://local` starts one on this machine.",
        ),
    ] = "",
    cpus: Annotated[
        float | None,
        typer.Option("--cpus-per-worker", min=0.001, rich_help_panel=_ON_RAY, help="Default: 1, or a share."),
    ] = None,
    gpus: Annotated[
        float | None,
        typer.Option(
            "--gpus-per-worker",
            min=0,
            rich_help_panel=_ON_RAY,
            help="Default: 1 where there are any; 0.5 shares.",
        ),
    ] = None,
    restarts: Annotated[
        int,
        typer.Option(min=0, max=1000, rich_help_panel=_ON_RAY, help="How often to start again what is lost."),
    ] = 3,
    working_dir: Annotated[
        Path | None,
        typer.Option(
            rich_help_panel=_ON_RAY, help="Folder that Ray copies to the nodes, for workers to start in."
        ),
    ] = None,
    variables: Annotated[
        list[str] | None,
        typer.Option(
            "--env", metavar="NAME", rich_help_panel=_ON_RAY, help="A variable to pass on to workers."
        ),
    ] = None,
    allow_open: Annotated[
        bool,
        typer.Option(
            "--allow-open-ray", rich_help_panel=_ON_RAY, help="Use a cluster that asks nobody for a token."
        ),
    ] = False,
) -> None:
    """Run a training script as several workers, on this machine or with `--on ray` on a Ray cluster.

    Each worker is the script in a process of its own, which calls `shoestring.init()`. What they
    print is passed on. When one fails the others are stopped, and its exit code is that of the run.
    """
    from shoestring.checkpoint.resume import begin
    from shoestring.config import Run

    _check(script, as_module, codec, policy, checkpoint, every, working_dir)
    if not on and (cpus is not None or gpus is not None or working_dir or variables or allow_open):
        raise UsageError("an option was given that is for Ray", hint="give `--on ray` too")
    run_name = name or f"{Path(script).stem}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    folder = (folder or Path("shoestring-runs") / run_name).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"the folder `{folder}` cannot be made: {error.strerror}", hint="give another with `--folder`"
        ) from None
    this = Run(
        name=run_name,
        workers=workers,
        folder=folder,
        checkpoint=checkpoint.absolute() if checkpoint is not None else None,
        every=every,
        resume=begin(resume, checkpoint, _say),
        codec=codec,
        policy=policy,
    )
    command = [*(["-m"] if as_module else []), script, *(args or [])]
    if on:
        from shoestring.launch.ray.launcher import Wishes, run_on_ray

        wishes = Wishes(
            shards,
            threads,
            cpus,
            gpus,
            restarts,
            environment=_values_of(variables or []),
            folder="" if working_dir else os.getcwd(),
            working_dir=str(working_dir or ""),
        )
        outcome = run_on_ray(on, command, this, wishes, allow_open=allow_open, say=_say)
    else:
        from shoestring.launch.local import run_local

        shards = shards or 1
        outcome = run_local(command, this, shards=shards, threads=threads)
    _report(outcome, this.workers, shards, folder, as_json)
    if outcome.failure is not None:
        raise typer.Exit(outcome.failure.code)


def _check(
    script: str,
    as_module: bool,
    codec: str,
    policy: str,
    checkpoint: Path | None,
    every: int,
    working_dir: Path | None,
) -> None:
    """Refuse what cannot work before any process is started."""
    from shoestring.codec import registry
    from shoestring.worker.rounds.policy import make_policy

    if not as_module and not os.path.exists(os.path.join(working_dir or "", script)):
        raise UsageError(
            f"there is no script `{script}`",
            hint="give the path of a Python file, or `-m` and the name of a module",
        )
    if codec and codec != "auto":
        registry.make(codec)
    if policy:
        make_policy(policy)
    if every and checkpoint is None:
        raise UsageError(
            f"`--every {every}` is given, but no folder for checkpoints", hint="give `--checkpoint DIR` too"
        )


def _values_of(variables: list[str]) -> dict[str, str]:
    for name in variables:
        if name not in os.environ:
            raise UsageError(
                f"`--env {name}`: there is no such variable here", hint=f"run `export {name}=...`"
            )
    return {name: os.environ[name] for name in variables}


def _report(outcome: "Outcome", workers: int, shards: int | None, folder: Path, as_json: bool) -> None:
    from shoestring.cli import complain

    failure = outcome.failure
    summary: dict[str, Any] = {
        "workers": workers,
        "shards": shards,
        "seconds": round(outcome.seconds, 3),
        "exit_codes": outcome.exit_codes,
        "failed": failure.who if failure is not None else None,
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
    if as_json:
        sys.stdout.flush()
        typer.echo(json.dumps(summary))


def _say(text: str) -> None:
    typer.echo(f"shoestring: {text}", err=True)
