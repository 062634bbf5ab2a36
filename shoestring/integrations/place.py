"""This process's place in its run, as launchers tell libraries, and whether a library has understood it.

A library that counts fewer processes than the run has workers would train on all data in each of
them, without a word.
"""

import os

import torch.distributed as dist

from shoestring.config import Run
from shoestring.errors import UsageError
from shoestring.launch.start import init

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")

_HINT = "start the script with `shoestring run` or `torchrun`, which see to it"


def told_place() -> Run:
    """Join the run, and make sure that a process group has, or will have, a process for each worker."""
    run = init()
    if run.workers == 1:
        return run
    if dist.is_initialized():
        check_place(run, dist.get_rank(), dist.get_world_size(), "the process group", hint=_HINT)
        return run
    if missing := _missing():
        raise UsageError(
            f"the run has {run.workers} workers, but the environment lacks `{'`, `'.join(missing)}`, "
            "by which the processes of libraries find each other",
            hint=_HINT,
        )
    process, processes = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    check_place(run, process, processes, "the environment", hint=_HINT)
    return run


def check_place(run: Run, process: int, processes: int, who: str, *, hint: str) -> None:
    """Refuse a library that counts other processes than the run has workers."""
    if (process, processes) != (run.worker, run.workers):
        raise UsageError(
            f"this is worker {run.worker} of {run.workers}, but to {who} process {process} of {processes}",
            hint=_HINT if _missing() else hint,
        )


def _missing() -> list[str]:
    return [name for name in VARIABLES if name not in os.environ]
