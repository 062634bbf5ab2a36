"""DistributedDataParallel over gloo: float32, its fp16 hook, and its PowerSGD hook.

PowerSGD works on a CPU only with all gradients in one bucket; with torch's own sizes it aborts.
"""

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks.train.entrant import Place
from shoestring.errors import UsageError

_dist: Any = dist  # its types leave out what is set here
_TIMEOUT = timedelta(minutes=30)
_ONE_BUCKET_MB = 1024
_POWERSGD_FROM = 2  # the first step that is compressed: the earliest it allows


class DdpEntrant:
    """A replica under DistributedDataParallel."""

    def __init__(
        self, model: DistributedDataParallel, optimizer: torch.optim.Optimizer, facts: dict[str, Any]
    ) -> None:
        self.model: nn.Module = model
        self._optimizer = optimizer
        self._facts = facts

    def step(self) -> None:
        self._optimizer.step()

    def zero_grad(self) -> None:
        self._optimizer.zero_grad()

    def facts(self) -> dict[str, Any]:
        return self._facts

    def close(self) -> None:
        dist.destroy_process_group()


def enter(
    place: Place, model: nn.Module, optimizer: torch.optim.Optimizer, options: dict[str, Any]
) -> DdpEntrant:
    """Join the other hosts; `options` may name a hook: `fp16`, or `powersgd` with a rank."""
    os.environ["GLOO_SOCKET_IFNAME"] = place.card
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{place.addresses[0]}:{place.port}",
        rank=place.host,
        world_size=place.hosts,
        timeout=_TIMEOUT,
    )
    hook = options.get("hook", "")
    if hook == "powersgd":
        _dist._DEFAULT_FIRST_BUCKET_BYTES = _ONE_BUCKET_MB << 20
        wrapped = DistributedDataParallel(model, bucket_cap_mb=_ONE_BUCKET_MB)
        state = powerSGD_hook.PowerSGDState(
            None,
            matrix_approximation_rank=options["rank"],
            start_powerSGD_iter=_POWERSGD_FROM,
        )
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif hook == "fp16":
        wrapped = DistributedDataParallel(model)
        wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif hook == "":
        wrapped = DistributedDataParallel(model)
    else:
        raise UsageError(f"no hook `{hook}`", hint="fp16 or powersgd")
    return DdpEntrant(wrapped, optimizer, {"hook": hook or "none", **options})
