"""Lightning: a strategy whose gradients go through Shoestring instead of DistributedDataParallel.

    trainer = Trainer(strategy=ShoestringStrategy(), ...)

All else is Lightning's own `ddp`: samplers, logging, checkpoints. The run says how many processes
there are; `devices` says which devices of a host its workers take in turn. The process group
carries no gradients, so it is gloo's unless another is wanted.
"""

import os
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy
from torch import nn

import shoestring
from shoestring.config import Run
from shoestring.errors import UsageError
from shoestring.integrations.place import told_place
from shoestring.worker.module.shell import is_wrapped


class ShoestringStrategy(DDPStrategy):
    """Lightning's `ddp` with the module wrapped by `shoestring.wrap`.

    `options` are those of every strategy (`checkpoint_io`, `precision_plugin`, ...) and `ddp`'s
    `process_group_backend` and `timeout`. `broadcast_buffers` is as in `shoestring.wrap`.
    """

    def __init__(self, *, broadcast_buffers: bool = True, **options: Any) -> None:
        run = told_place()
        super().__init__(
            cluster_environment=_Environment(run), **{"process_group_backend": "gloo", **options}
        )
        self._broadcast_buffers = broadcast_buffers
        if self._ddp_kwargs or self._ddp_comm_hook is not None or self._model_averaging_period is not None:
            raise UsageError(
                f"`{'`, `'.join(options)}`: some of it is for DistributedDataParallel, not for Shoestring",
                hint="leave it out: unused parameters need no setting, and a codec takes a hook's place",
            )

    @property
    def root_device(self) -> torch.device:
        """The device of this worker."""
        devices: list[torch.device] = self.parallel_devices
        own: int = self.local_rank
        return devices[own % len(devices)]

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """How a sampler splits data: by the workers of the run."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def setup_distributed(self) -> None:
        """Have a process group, also where this process is alone and nobody has told it an address."""
        if self.world_size == 1 and not dist.is_initialized():
            backend = self._get_process_group_backend()
            dist.init_process_group(backend, init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
        super().setup_distributed()

    def configure_ddp(self) -> None:
        """Wrap the module, where Lightning's own would put another one around it."""
        module: nn.Module = self.lightning_module
        if not is_wrapped(module):  # by an earlier `fit`
            shoestring.wrap(module, broadcast_buffers=self._broadcast_buffers)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Take a training step as the module's forward pass, by which Shoestring knows one."""
        with self.precision_plugin.train_step_context():
            module = self.lightning_module
            return self._forward_redirection(module, module, "training_step", *args, **kwargs)


class _Environment(TorchElasticEnvironment):
    """The processes of a run, as its launcher has started them."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def world_size(self) -> int:
        return self._run.workers

    def global_rank(self) -> int:
        return self._run.worker

    def local_rank(self) -> int:
        return self._run.local

    def node_rank(self) -> int:
        return int(os.environ.get("GROUP_RANK", 0))

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Let `devices` and `num_nodes` be: the run is what counts."""
