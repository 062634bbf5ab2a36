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

A batch in the CPU's memory takes compiled loops (`normkernels.py`), any other torch's operations.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from shoestring.worker.batchnorm import normkernels as kernels

# Batch renormalisation's limits (Ioffe, 2017): values are amplified by no more than R
# against what the batch alone would do, and shifted by no more than D deviations.
AMPLIFICATION = kernels.AMPLIFICATION
SHIFT = kernels.SHIFT


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
    """What one pass of a batch through a layer showed."""

    count: int  # values a channel
    sums: Any  # [4, C] in float64, an array or a tensor: of values, their squares, and the two slopes
    like: Any  # where, and as what, the layer wants to know of others: an array or a tensor

    @classmethod
    def of(cls, count: int, mean: Any, variance: Any, shift: Any, scale: Any) -> "Seen":
        """From means over the batch."""
        rows = (mean, variance, shift, scale)
        if isinstance(mean, Tensor):
            sums: Any = torch.stack([row.double() for row in rows])
        else:
            sums = np.stack(rows, dtype=np.float64)
        sums[1] += sums[0] * sums[0]
        return cls(count, sums * count, mean)


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


@dataclass(frozen=True)
class How:
    """What a pass of a batch depends on beside the values."""

    others: Others | None
    note: Callable[[Seen], None]
    eps: float
    is_frozen: bool  # no backward pass will come, as nothing is trained up to here


def normalise(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    others: Others | None,
    note: Callable[[Seen], None],
    eps: float,
    is_frozen: bool,
) -> Tensor:
    """Normalise a batch; a backward pass through the result calls `note` once, or this if none will come."""
    is_plain = x.device.type == "cpu" and x.dtype in _WIDTHS and x.dtype == weight.dtype and x.is_contiguous()
    apply: Any = OnCpu.apply if is_plain else Normalise.apply
    output: Tensor = apply(x, weight, bias, How(others, note, eps, is_frozen))
    return output


_WIDTHS = (torch.float32, torch.float64)


class OnCpu(torch.autograd.Function):
    """`normalise` in compiled loops."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, how: How) -> Tensor:
        known = _known(how.others, x.shape[1])
        found = np.empty((4, x.shape[1]))
        y = torch.empty_like(x)
        kernels.forward(_rows(x), plain(weight), plain(bias), *known[:3], how.eps, _rows(y), found)
        if how.is_frozen:
            none = np.zeros(x.shape[1])
            how.note(
                Seen.of(x.numel() // x.shape[1], found[kernels.MEAN], found[kernels.VARIANCE], none, none)
            )
        ctx.save_for_backward(x, weight)
        ctx.known, ctx.found, ctx.how = known, found, how
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        how: How = ctx.how
        is_local = how.others is not None and how.others.is_local
        wants_dx = bool(ctx.needs_input_grad[0])
        dx = torch.empty_like(x) if wants_dx else x
        by_affine = torch.empty((2, x.shape[1]), dtype=x.dtype)
        sums = np.empty((4, x.shape[1]))
        kernels.backward(
            _rows(x), _rows(dy.contiguous()), plain(weight), ctx.found, *ctx.known, is_local, how.eps,
            wants_dx, _rows(dx), by_affine.numpy(), sums,
        )  # fmt: skip
        how.note(Seen(x.numel() // x.shape[1], sums, sums))
        dweight, dbias = by_affine.unbind()
        return dx if wants_dx else None, dweight, dbias, None


def _rows(tensor: Tensor) -> Any:
    """[N, C, values], as NumPy sees it."""
    return tensor.detach().numpy().reshape(tensor.shape[0], tensor.shape[1], -1)


def _known(others: Others | None, channels: int) -> tuple[Any, ...]:
    """What is known of others as the kernels take it: no values at all where nothing is."""
    if others is None:
        none = np.zeros(channels)
        return 0.0, none, none, none, none
    rows = (plain(row) for row in (others.mean, others.variance, others.shift, others.scale))
    host = (row.cpu().numpy() if isinstance(row, Tensor) else row for row in rows)
    return float(others.count), *(np.ascontiguousarray(row, np.float64) for row in host)


class Normalise(torch.autograd.Function):
    """`normalise` in torch's operations, on any device and in any layout."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, how: How) -> Tensor:
        running: tuple[Tensor | None, Tensor | None] = (None, None)
        if x.dtype != weight.dtype:
            # Thrown away, but the result has their type: without them bfloat16 would round it.
            running = torch.zeros_like(weight), torch.zeros_like(weight)
        mean, variance = torch.batch_norm_update_stats(x, *running, 0.0)
        count = x.numel() // x.shape[1]
        own = joint = (plain(mean), plain(variance))
        others = how.others
        if others is not None:
            others = others.like(mean)
            joint = join(*own, count, others, how.eps)
        if how.is_frozen:
            how.note(Seen.of(count, *own, 0 * own[0], 0 * own[0]))
        joint_mean, joint_variance = map(_tensor, joint)
        ctx.save_for_backward(x, weight, joint_mean, joint_variance)
        ctx.own, ctx.joint, ctx.others, ctx.note, ctx.eps = own, joint, others, how.note, how.eps
        ctx.count = count
        return nn.functional.batch_norm(x, joint_mean, joint_variance, weight, bias, False, 0.0, how.eps)

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
        ctx.note(Seen.of(count, mean, variance, shift / count, scale / count))
        if not wants_dx:
            return None, dweight, dbias, None
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
        return dx.to(x.dtype), dweight, dbias, None


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
