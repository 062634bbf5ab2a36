"""Change every float32 value of a training by as much as another order of its operations could.

Rules on the shards (`shoestring/server/rules.py`) compute what torch's optimizers compute, in
float32, with the factors of a step worked out in another order. The longest, Adam with amsgrad and
decay, has 12 operations from gradient to update. Each rounds by at most u = 2^-24 of its result, on
either side: the two updates differ by at most about 2 * 12 * u of the update itself (sums of terms
of opposite sign aside, where the same holds of the terms). The parameter is rounded once or twice
more on either side: 2 * 2 * u of the parameter.

What these differences make of the parameters after 20 steps depends on the net: a gradient is a
function of the parameters, and Adam divides by what may be small. So it is not bounded by hand but
computed: DDP trains once more, with every value of every gradient changed by 24 u and every value of
every parameter by 4 u after each step, up or down by a drawn sign, the same on all workers. `compare`
takes `MARGIN` times the difference that this makes as its tolerance: errors that all have one sign
instead of drawn ones add up faster, in 20 steps by at most the square root of 20.
"""

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

UNIT = 2.0**-24
MARGIN = 20**0.5
_GRADIENT, _PARAMETER = 24 * UNIT, 4 * UNIT


class Shaken:
    """A `with` block in which every optimizer's steps are shaken."""

    def __init__(self) -> None:
        # By the steps of each optimizer, as one worker may have an optimizer more than the other.
        self._steps: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> None:
        self._handles = [
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._after),
        ]

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _before(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._steps[optimizer] = self._steps.get(optimizer, 0) + 1
        source = torch.Generator().manual_seed(2 * self._steps[optimizer])
        for parameter in _parameters(optimizer):
            if parameter.grad is not None and parameter.grad.layout == torch.strided:
                _shake(parameter.grad, _GRADIENT, source)

    def _after(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        source = torch.Generator().manual_seed(2 * self._steps[optimizer] + 1)
        for parameter in _parameters(optimizer):
            _shake(parameter.detach(), _PARAMETER, source)


def _shake(values: Tensor, much: float, source: torch.Generator) -> None:
    if values.dtype == torch.float32:
        signs = torch.randint(0, 2, values.shape, generator=source) * 2 - 1
        # In float64, as float32 would round the factors themselves.
        values.copy_((values.double() * (1 + much * signs)).float())


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
