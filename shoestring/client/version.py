"""A model's parameters as a run had them after one round."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from shoestring.codec.base import Vector
from shoestring.errors import UsageError
from shoestring.model.precision import NARROW, to_bits

if TYPE_CHECKING:
    from torch import nn

_SHOWN = 3  # names in a message


@dataclass(frozen=True, eq=False)
class Version:
    """The parameters of one round, by name, in the order of the model.

    Arrays are float32; a parameter of two bytes a value has in its array what it can hold, exactly.
    `dtypes` are those of the run's own parameters, as torch names them. `is_whole`: all parameters are
    those that every worker had after `round`. Else workers do not wait for each other (policies `bounded`
    and `async`): each part of the model is as some pushes have left it, among them those of all workers
    up to their push `round`.
    """

    round: int
    is_whole: bool
    parameters: Mapping[str, Vector] = field(repr=False)
    dtypes: Mapping[str, str] = field(repr=False)

    def parameter_hash(self) -> str:
        """What `optimizer.parameter_hash()` gives on a worker that has the same bits."""
        digest = hashlib.sha256()
        for name, values in self.parameters.items():
            dtype = self.dtypes[name]
            flat = np.ascontiguousarray(values).reshape(-1)
            digest.update((to_bits(flat, dtype) if dtype in NARROW else flat).view(np.uint8).data)
        return digest.hexdigest()

    def load_into(self, model: "nn.Module", *, strict: bool = True) -> None:
        """Copy the parameters into a torch model of the same names and shapes.

        `strict` refuses a model that has more than what the run trains: buffers, such as the running
        statistics of BatchNorm, and frozen parameters are not on shards, and would stay as they are.
        """
        import torch

        own = dict(model.named_parameters(remove_duplicate=False))
        unknown = [name for name in self.parameters if name not in own]
        if unknown:
            raise UsageError(
                f"the run trains {_named(unknown)}, which the model does not have",
                hint="build the model as the run's script does, without wrappers that change names",
            )
        for name, values in self.parameters.items():
            if tuple(own[name].shape) != values.shape:
                raise UsageError(
                    f"parameter `{name}` has shape {tuple(own[name].shape)}, in the run {values.shape}",
                    hint="build the model as the run's script does",
                )
        brought = {own[name] for name in self.parameters}
        left = [name for name in model.state_dict() if own.get(name) not in brought]
        if strict and left:
            raise UsageError(
                f"the model has {_named(left)}, which the run's shards do not have: only parameters that "
                "are trained are there",
                hint="bring buffers and frozen parameters yourself, such as from a checkpoint, and give "
                "`strict=False`",
            )
        with torch.no_grad():
            for name, values in self.parameters.items():
                own[name].copy_(torch.from_numpy(np.array(values)))


def _named(names: list[str]) -> str:
    shown = ", ".join(f"`{name}`" for name in names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"
