"""This process's place in its run, as launchers tell libraries, and whether a library has understood it.

A library that counts fewer processes than the run has workers would train on all data in each of
them, without a word.
"""

import os

from shoestring.config import Run
from shoestring.errors import UsageError
from shoestring.launch.start import init

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def told_place() -> Run:
    """Join the run, and make sure that the environment tells libraries what the run knows."""
    run = init()
    if run.workers == 1:
        return run
    _check_variables(run)
    process, processes = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    check_place(run, process, processes, "the environment", hint="unset `RANK` and `WORLD_SIZE`")
    return run


def check_place(run: Run, process: int, processes: int, who: str, *, hint: str) -> None:
    """Refuse a library that counts other processes than the run has workers."""
    if (process, processes) != (run.worker, run.workers):
        _check_variables(run)
        raise UsageError(
            f"this is worker {run.worker} of {run.workers}, but to {who} process {process} of {processes}",
            hint=hint,
        )


def _check_variables(run: Run) -> None:
    missing = [name for name in VARIABLES if name not in os.environ]
    if missing:
        raise UsageError(
            f"the run has {run.workers} workers, but the environment lacks `{'`, `'.join(missing)}`, "
            "by which the processes of libraries find each other",
            hint="start the script with `shoestring run` or `torchrun`",
        )
