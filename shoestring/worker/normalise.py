"""Normalise a batch by its own statistics and those of the other workers' batches.

The other workers' batches are `count` values with a mean and a variance, as far as the
shards know them. Joined with the batch's own they give the statistics that normalise: if
they were those of this very step, the result would be that of one large batch.

In one large batch the loss of every worker depends on every value through the shared
statistics. The gradient flows through the batch's own part exactly; how the others'
losses depend on the statistics comes from the shards too, as two slopes a channel. Left
out, the activations drift, and accuracy is lost: see docs/batchnorm.md.

With local steps the others' slopes are of parameters that this worker does not have. Then
the gradient flows as if the batch had been normalised by its own statistics, and been
scaled and shifted to the joint ones afterwards (batch renormalisation).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

# Batch renormalisation's limits (Ioffe, 2017): values are amplified by no more than R
# against what the batch alone would do, and shifted by no more than D deviations.
AMPLIFICATION = 3.0
SHIFT = 5.0


@dataclass(frozen=True)
class Others:
    """The batches of the other workers: a number of values, and arrays or tensors of shape [C]."""

    count: float
    mean: Any
    variance: Any
    shift: Any  # the mean derivative of their loss by a normalised value
    scale: Any  # and that times the value
    is_local: bool = False  # workers take local steps: their losses no longer meet in one gradient

    def like(self, tensor: Tensor) -> "Others":
        """The same as `plain` gives tensors of this device and type."""
        is_plain = isinstance(self.mean, np.ndarray) and tensor.device.type == "cpu"
        if is_plain and self.mean.dtype == tensor.numpy().dtype:
            return self
        values = (_tensor(x).to(tensor) for x in (self.mean, self.variance, self.shift, self.scale))
        mean, variance, shift, scale = map(plain, values)
        return Others(self.count, mean, variance, shift, scale, self.is_local)


@dataclass(frozen=True)
class Seen:
    """What one pass of a batch through a layer showed: arrays, or tensors where they are not on the CPU."""

    count: int  # values a channel
    mean: Any
    variance: Any
    shift: Any
    scale: Any


def plain(tensor: Any) -> Any:
    """The values as NumPy sees them, where that is possible: it is quicker with so few of them."""
    if isinstance(tensor, np.ndarray):
        return tensor
    tensor = tensor.detach() if tensor.requires_grad else tensor
    return tensor.numpy() if tensor.device.type == "cpu" else tensor


def join(mean: Any, variance: Any, count: int, others: Others, eps: float) -> tuple[Any, Any]:
    """The mean and variance of a batch together with those of the others, within limits.

    Takes tensors or arrays of shape [C], `others` alike, and returns the same.
    """
    most: Any = torch if isinstance(mean, Tensor) else np
    own = count / (count + others.count)
    apart = mean - others.mean
    joint_mean = mean - (1 - own) * apart
    joint = own * variance + (1 - own) * others.variance + own * (1 - own) * apart * apart
    joint = most.maximum(joint, (variance + eps) / AMPLIFICATION**2 - eps)
    reach = SHIFT * most.sqrt(joint + eps)
    return most.minimum(most.maximum(joint_mean, mean - reach), mean + reach), joint


class Normalise(torch.autograd.Function):
    """`apply(x, weight, bias, others, note, eps, is_frozen)`; a backward pass calls `note(seen)` once.

    Where no backward pass will come, as nothing is trained up to here, forward calls it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        others: Others | None,
        note: Any,
        eps: float,
        is_frozen: bool,
    ) -> Tensor:
        running: tuple[Tensor | None, Tensor | None] = (None, None)
        if x.dtype != weight.dtype:
            # Thrown away, but the result has their type: without them bfloat16 would round it.
            running = torch.zeros_like(weight), torch.zeros_like(weight)
        mean, variance = torch.batch_norm_update_stats(x, *running, 0.0)
        count = x.numel() // x.shape[1]
        own = joint = (plain(mean), plain(variance))
        if others is not None:
            others = others.like(mean)
            joint = join(*own, count, others, eps)
        if is_frozen:
            note(Seen(count, own[0], own[1], 0 * own[0], 0 * own[0]))
        joint_mean, joint_variance = map(_tensor, joint)
        ctx.save_for_backward(x, weight, joint_mean, joint_variance)
        ctx.own, ctx.joint, ctx.others, ctx.note, ctx.eps, ctx.count = own, joint, others, note, eps, count
        return nn.functional.batch_norm(x, joint_mean, joint_variance, weight, bias, False, 0.0, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, joint_mean, joint_variance = ctx.saved_tensors
        count, (mean, variance) = ctx.count, ctx.own
        inverse = (ctx.joint[1] + ctx.eps) ** -0.5
        wants_dx = bool(ctx.needs_input_grad[0])
        is_exact = x.dtype == weight.dtype  # else the native gradient would be rounded before it is whole
        # Some devices read the statistics in one form, some in the other.
        both = (joint_mean, joint_variance, joint_mean, _tensor(inverse))
        dx, dweight, dbias = torch.ops.aten.native_batch_norm_backward(
            dy, x, weight, *both, False, ctx.eps, [wants_dx and is_exact, True, True]
        )
        # The loss by all normalised values of a channel, and that times the values: [C].
        w = plain(weight)
        shift, scale = w * plain(dbias), w * plain(dweight)
        ctx.note(Seen(count, mean, variance, shift / count, scale / count))
        if not wants_dx:
            return None, dweight, dbias, None, None, None, None
        by_mean, by_variance = _by_own(
            shift, scale, ctx.own, ctx.joint[0], inverse, count, ctx.others, ctx.eps
        )
        # The mean's derivative by a value is 1 / count, the variance's 2 (x - mean) / count.
        shape = [1, -1, *[1] * (x.dim() - 2)]
        slope = by_variance * (2 / count)
        offset = by_mean / count - slope * mean
        if not is_exact:
            dx = torch.mul(dy, _tensor(w * inverse).view(shape))  # of the wider type
        dx.add_(_tensor(offset).view(shape)).addcmul_(x, _tensor(slope).view(shape))
        return dx.to(x.dtype), dweight, dbias, None, None, None, None


def _by_own(
    shift: Any,
    scale: Any,
    own: tuple[Any, Any],
    joint_mean: Any,
    inverse: Any,
    count: int,
    others: Others | None,
    eps: float,
) -> tuple[Any, Any]:
    """The loss's derivatives by the batch's own mean and variance, through the joint ones."""
    mean, variance = own
    if others is None:
        return -shift * inverse, -0.5 * scale * inverse * inverse
    if others.is_local and count > 1:
        scale = scale - (mean - joint_mean) * inverse * shift  # times the value less its shift
        return -shift * inverse, -0.5 * scale / (variance + eps)
    shift = shift + others.count * others.shift
    scale = scale + others.count * others.scale
    return _through(mean, variance, count, others, eps, -shift * inverse, -0.5 * scale * inverse * inverse)


def _through(
    mean: Any, variance: Any, count: int, others: Others, eps: float, by_mean: Any, by_variance: Any
) -> tuple[Any, Any]:
    """Derivatives by what `join` returns, as derivatives by the batch's own: the chain rule, by hand."""
    most: Any = torch if isinstance(mean, Tensor) else np
    own = count / (count + others.count)
    apart = mean - others.mean
    free = own * variance + (1 - own) * others.variance + own * (1 - own) * apart * apart
    least = (variance + eps) / AMPLIFICATION**2 - eps
    deviation = most.sqrt(most.maximum(free, least) + eps)
    beyond = (1 - own) * apart / (SHIFT * deviation)  # 1 or more: the mean stops `SHIFT` deviations below
    none = 0 * by_mean
    stopped = most.where(beyond > 1, -by_mean, most.where(beyond < -1, by_mean, none))
    by_variance = by_variance + stopped * (0.5 * SHIFT) / deviation
    by_free = most.where(free >= least, by_variance, none)
    by_own = most.where(abs(beyond) > 1, by_mean, own * by_mean) + by_free * (2 * own * (1 - own)) * apart
    return by_own, own * by_free + (by_variance - by_free) / AMPLIFICATION**2


def _tensor(values: Any) -> Tensor:
    return values if isinstance(values, Tensor) else torch.from_numpy(values)
