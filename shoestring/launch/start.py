"""`init`: find out which run this process was started in, and take part in it."""

import os
import signal
import threading
from collections.abc import Mapping
from dataclasses import replace

from shoestring.checkpoint.resume import AUTO, begin
from shoestring.config import Run
from shoestring.errors import UsageError
from shoestring.launch import lifeline
from shoestring.launch.notice import say
from shoestring.worker import session


def init() -> Run:
    """Take this process's place in its run: its `worker` of `workers`.

    Started by `shoestring run`, torchrun or Slurm, it is one of several workers; started
    alone, it is a run of its own. A second call changes nothing.
    """
    try:
        return session.current().run
    except UsageError:
        pass  # the first call
    run = Run.here()
    _obey_lifeline(run.stop_grace_s)
    kind = detect(os.environ)
    if kind == "torchrun":
        from shoestring.launch import torchrun

        return torchrun.join(run)
    if kind == "slurm":
        from shoestring.launch import slurm

        return slurm.join(run)
    if run.is_alone:
        run = replace(run, resume=begin(str(run.resume or AUTO), run.checkpoint, say))
    return session.begin(run).run


def detect(environment: Mapping[str, str]) -> str:
    """Say who started this process: `shoestring`, `torchrun`, `slurm`, or nobody: `alone`."""
    if "SHOESTRING_WORKER" in environment:
        return "shoestring"
    if all(name in environment for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")):
        return "torchrun" if environment["WORLD_SIZE"] != "1" else "alone"
    if "SLURM_PROCID" in environment and environment.get("SLURM_NTASKS", "1") != "1":
        return "slurm"
    return "alone"


def _obey_lifeline(grace_s: float) -> None:
    """End this process when its launcher is gone."""
    # Not for this process's own children: there the number may be another file.
    number = os.environ.pop(lifeline.VARIABLE, "")
    if number.isdecimal():
        lifeline.watch(int(number), lambda: _end(grace_s))


def _end(grace_s: float) -> None:
    # A script's own handler of SIGTERM gets a moment.
    threading.Timer(grace_s, os._exit, (1,)).start()
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpgrp(), signal.SIGTERM)  # its data loaders too
    else:
        os.kill(os.getpid(), signal.SIGTERM)
