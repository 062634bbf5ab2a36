"""BatchNorm whose statistics are shared through the shards.

`share_batchnorm` changes the layers before `wrap`: they get another class and stay the same
objects otherwise, so that a state dict fits either kind. Alone, in evaluation and outside a
run a shared layer computes what a plain one would, bit for bit.
"""

from collections.abc import Iterator
from typing import Any, Protocol, TypeVar, cast

import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _LazyNormBase

from shoestring.errors import UsageError
from shoestring.worker.batchnorm.normalise import Others, Seen, normalise

Model = TypeVar("Model", bound=nn.Module)

HORIZON = 5.0  # steps
_LONGEST = 1e6


class Record(Protocol):
    """Where a layer finds what others have seen, and tells what it has."""

    others: Others | None

    def note(self, seen: Seen) -> None: ...


class SharedBatchNorm(_BatchNorm):
    """A BatchNorm layer of any dimension; `kind` is the class that it had before."""

    kind: type[_BatchNorm]
    horizon: float
    record: Record | None

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        record = self.record
        if not self.training or record is None or input.numel() == 0:
            return super().forward(input)
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        weight: Tensor = self.weight
        bias: Tensor = self.bias
        if not self.affine:
            dtype = torch.promote_types(input.dtype, torch.float32)
            weight = torch.ones(self.num_features, device=input.device, dtype=dtype)
            bias = torch.zeros_like(weight)
        is_trained = input.requires_grad or weight.requires_grad or bias.requires_grad
        # A pass that activation checkpointing repeats in backward has been counted.
        is_repeated = torch._C._current_graph_task_id() != -1
        is_frozen = torch.is_grad_enabled() and not is_trained and not is_repeated
        return normalise(input, weight, bias, record.others, record.note, self.eps, is_frozen)

    def set_running(self, mean: NDArray[Any], variance: NDArray[Any]) -> None:
        """Set the statistics that evaluation uses."""
        for name, values in (("running_mean", mean), ("running_var", variance)):
            buffer = self._buffers[name]
            if buffer is None:
                continue
            if buffer.device.type == "cpu":  # quicker, and the same
                buffer.numpy()[:] = values
            else:
                buffer.copy_(torch.from_numpy(values))

    def _check_input_dim(self, input: Tensor) -> None:
        check: Any = self.kind._check_input_dim
        check(self, input)

    def extra_repr(self) -> str:
        return f"{self.num_features}, eps={self.eps}, affine={self.affine}, horizon={self.horizon:g}"


_FORWARDS = (_BatchNorm.forward, nn.SyncBatchNorm.forward, SharedBatchNorm.forward)


def share_batchnorm(model: Model, *, horizon: float = HORIZON) -> Model:
    """Share the statistics of all BatchNorm layers between the workers of the run.

    Call it before `wrap`; changes the model in place and returns it. `horizon` is over how many
    steps of all workers the statistics are taken, older ones counting less and less.
    """
    if not 1 <= horizon <= _LONGEST:
        raise UsageError(
            f"a horizon of {horizon} steps", hint=f"give 1 (the last step alone) to {_LONGEST:g}"
        )
    if hasattr(type(model), "_shoestring_plain"):
        raise UsageError("this model is wrapped already", hint="call `share_batchnorm` before `wrap`")
    layers = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    for layer in layers:  # before any is changed
        _refuse_strange(layer)
    for layer in layers:
        shared = cast(SharedBatchNorm, layer)
        if not isinstance(layer, SharedBatchNorm):
            # In place: whoever holds the layer, its hooks, parameters or buffers notices nothing.
            kind = type(layer)
            layer.__class__ = SharedBatchNorm
            shared.kind, shared.record = kind, None
        shared.horizon = horizon
    return model


def unshare_batchnorm(model: Model) -> Model:
    """Undo `share_batchnorm`: the layers are what they were, with the statistics they have now."""
    for _, layer in shared_layers(model):
        kind = layer.kind
        del layer.kind, layer.horizon, layer.record
        object.__setattr__(layer, "__class__", kind)
    return model


def _refuse_strange(layer: _BatchNorm) -> None:
    name = type(layer).__name__
    if isinstance(layer, _LazyNormBase):
        raise UsageError(
            f"a `{name}` does not know its channels yet",
            hint="pass one batch through the model first, or use the layer that is not lazy",
        )
    if type(layer).forward not in _FORWARDS:
        raise UsageError(
            f"a `{name}` does more than a BatchNorm, or does it otherwise",
            hint="use torch's own layer, with what is done besides in a layer after it",
        )


def shared_layers(model: nn.Module) -> Iterator[tuple[str, SharedBatchNorm]]:
    """The shared layers of a model with their names, each once."""
    for name, module in list(model.named_modules()):
        if isinstance(module, SharedBatchNorm):
            yield name, module
