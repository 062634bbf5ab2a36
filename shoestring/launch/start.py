"""`init`: find out which run this process was started in, and take part in it."""

import os
import signal
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from shoestring.checkpoint.resume import AUTO, begin
from shoestring.config import Run
from shoestring.launch import lifeline
from shoestring.launch.notice import say
from shoestring.worker import session

if TYPE_CHECKING:
    import torch
    from torch import nn

    from shoestring.worker.optimizer import SharedOptimizer
    from shoestring.worker.rounds.policy import Policy

    Model = TypeVar("Model", bound=nn.Module)


def init() -> Run:
    """Take this process's place in its run: its `worker` of `workers`.

    Started by `shoestring run`, torchrun or Slurm, it is one of several workers; started
    alone, it is a run of its own. A second call changes nothing.
    """
    here = session.found()
    if here is not None:
        return here.run
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


@overload
def wrap(model: "Model", *, codec: str | None = None, broadcast_buffers: bool = True) -> "Model": ...


@overload
def wrap(
    model: "Model",
    optimizer: "torch.optim.Optimizer | Sequence[torch.optim.Optimizer]",
    *,
    codec: str | None = None,
    policy: "str | Policy | None" = None,
    clip_norm: float = 0.0,
    batch: Literal["even", "auto"] = "even",
    broadcast_buffers: bool = True,
) -> "tuple[Model, SharedOptimizer]": ...


def wrap(
    model: Any,
    optimizer: Any = None,
    *,
    codec: str | None = None,
    policy: Any = None,
    clip_norm: float = 0.0,
    batch: Literal["even", "auto"] = "even",
    broadcast_buffers: bool = True,
) -> Any:
    """Train this model together with the other workers of the run, which is joined if need be.

    `model = wrap(model)` takes DistributedDataParallel's place: when `backward` returns, every `.grad` is
    the mean of all workers', and the script's own optimizers, clipping and scaling go on from there.
    `model, optimizer = wrap(model, optimizer)` lets the shards update the parameters, or each worker for
    some steps (policy `local`). An optimizer that the shards have no rule for, or several, run on the
    workers as with `wrap(model)`.

    Returns the same model, with a `no_sync()` context for gradient accumulation. All workers start from
    the first worker's parameters and buffers; buffers follow the first worker's after every round, unless
    `broadcast_buffers=False`. `codec` and `policy` take the place of the run's settings. `clip_norm` clips
    the mean gradient by its norm over all parameters. `batch="auto"` moves samples from slow workers to
    fast ones, where batches come from `shoestring.batches(data, global_batch=...)`.
    """
    from shoestring.worker.wrap import join

    return join(
        session.current(),
        model,
        optimizer,
        codec=codec,
        policy=policy,
        clip_norm=clip_norm,
        batch=batch,
        broadcast_buffers=broadcast_buffers,
    )


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


session.starter = init
