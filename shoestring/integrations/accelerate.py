"""Accelerate: its `Accelerator`, with Shoestring in the place of DistributedDataParallel.

    from shoestring.integrations.accelerate import Accelerator  # was: from accelerate import Accelerator

`prepare` gives back the model that `shoestring.wrap(model)` gives. All else is Accelerate's own:
it splits data, gathers metrics and saves states over its process group, which carries no gradients.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import accelerate
import torch
from accelerate.utils import DDPCommunicationHookType, DistributedType
from torch import nn

import shoestring
from shoestring.errors import UsageError
from shoestring.integrations.place import check_place
from shoestring.worker.module.shell import is_wrapped

# Under these Accelerate has another way with gradients than DistributedDataParallel.
_OTHER_WAYS = (
    DistributedType.DEEPSPEED,
    DistributedType.FSDP,
    DistributedType.MEGATRON_LM,
    DistributedType.XLA,
)

_own_prepare_model = accelerate.Accelerator.prepare_model


class Accelerator(accelerate.Accelerator):
    """Accelerate's `Accelerator`, whose `prepare` wraps models by `shoestring.wrap`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        run = shoestring.init()
        if run.workers > 1 and not torch.accelerator.is_available():
            kwargs.setdefault("cpu", True)  # else Accelerate takes each process for one that trains alone
        super().__init__(*args, **kwargs)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """Do what Accelerate's does, but for DistributedDataParallel."""
        return prepare_model(self, model, device_placement, evaluation_mode)

    def join_uneven_inputs(
        self, joinables: Sequence[Any], even_batches: bool | None = None
    ) -> AbstractContextManager[None]:
        """Do nothing where batches are even, which is how Accelerate makes them; refuse uneven ones."""
        if not (self.even_batches if even_batches is None else even_batches):
            raise UsageError(
                "`join_uneven_inputs` where some processes may have more batches than others",
                hint="leave `even_batches` on, which repeats a few samples at the end of an epoch",
            )
        return nullcontext()

    @staticmethod
    def trigger_sync_in_backward(model: nn.Module) -> AbstractContextManager[None]:
        """Refuse: whether gradients are exchanged is decided when the forward pass begins."""
        raise UsageError(
            "`trigger_sync_in_backward`, after a forward pass in `no_sync`",
            hint="leave the last forward pass out of `no_sync`, with its backward pass",
        )


def prepare_model(
    accelerator: accelerate.Accelerator,
    model: nn.Module,
    device_placement: bool | None = None,
    evaluation_mode: bool = False,
) -> Any:
    """Wrap a model that is to be trained, and leave the rest to Accelerate: device, precision, compiling."""
    is_trained = any(parameter.requires_grad for parameter in model.parameters())
    if not evaluation_mode and is_trained and not is_wrapped(model):
        _check(accelerator)
        if device_placement or (device_placement is None and accelerator.device_placement):
            _place(accelerator, model)
        wanted = accelerator.ddp_handler
        model = shoestring.wrap(model, broadcast_buffers=wanted is None or wanted.broadcast_buffers)
    # "For evaluation" is how Accelerate leaves DistributedDataParallel out, and nothing else.
    return _own_prepare_model(accelerator, model, device_placement, evaluation_mode=True)


def _check(accelerator: accelerate.Accelerator) -> None:
    kind = accelerator.distributed_type
    if kind in _OTHER_WAYS or accelerator.parallelism_config is not None:
        way = f"`{kind.value}`" if kind in _OTHER_WAYS else "a `ParallelismConfig`"
        raise UsageError(
            f"Accelerate is set to {way}; Shoestring takes the place of DistributedDataParallel alone",
            hint="run `accelerate config` again, or start the script with `shoestring run`",
        )
    check_place(
        shoestring.init(),
        accelerator.process_index,
        accelerator.num_processes,
        "Accelerate",
        hint="without a GPU say `Accelerator(cpu=True)` or `TrainingArguments(use_cpu=True)`",
    )
    wanted = accelerator.ddp_handler
    if wanted is not None and wanted.comm_hook != DDPCommunicationHookType.NO:
        raise UsageError(
            f"a communication hook of DistributedDataParallel, `{wanted.comm_hook.value}`",
            hint="choose a codec instead: `--codec float16`, `bfloat16` or `dct`",
        )


def _place(accelerator: accelerate.Accelerator, model: nn.Module) -> None:
    """Move a model to its device before it is wrapped, but for one that was loaded onto devices."""
    if getattr(model, "hf_device_map", None) is None:
        model.to(accelerator.device)
