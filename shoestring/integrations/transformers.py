"""Transformers: a callback by which a `Trainer` trains through Shoestring instead of DistributedDataParallel.

    trainer = Trainer(model, args, ..., callbacks=[ShoestringCallback()])

The Trainer leaves to Accelerate how a model is wrapped, and tells its callbacks of neither. So the
callback has to reach further than its Trainer: from when it is made, every `Accelerator` of this
process wraps the models it prepares for training as `shoestring.integrations.accelerate` says.
"""

from typing import Any

import accelerate
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

import shoestring
from shoestring.errors import UsageError
from shoestring.integrations.accelerate import prepare_model
from shoestring.integrations.place import check_place
from shoestring.worker.module.shell import is_wrapped


class ShoestringCallback(TrainerCallback):
    """Has a `Trainer`, or any of its kind, wrap its model by `shoestring.wrap`."""

    def __init__(self) -> None:
        accelerate.Accelerator.prepare_model = prepare_model

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Refuse a Trainer that has not understood that it is one of several."""
        check_place(
            shoestring.init(),
            args.process_index,
            args.world_size,
            "the Trainer",
            hint="without a GPU say `TrainingArguments(use_cpu=True)`",
        )

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **_: Any,
    ) -> None:
        """Refuse to train a model whose gradients would go another way."""
        if model is not None and not is_wrapped(model):
            raise UsageError(
                "the Trainer has prepared its model otherwise than by Shoestring",
                hint="train without DeepSpeed, FSDP and `torch.nn.DataParallel`",
            )
