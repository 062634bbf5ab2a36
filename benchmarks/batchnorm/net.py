"""The net that `python -m benchmarks.batchnorm` trains, and BatchNorm as it is without sharing.

A small residual net with a norm after every convolution. Workers need not be processes to
know what they would compute: `LocalNorm` takes the batches of all workers as one tensor
and normalises each worker's samples by themselves, which gives the mean of the workers'
gradients. `JoinedNorm` is for replicas whose parameters differ: the net holds them side
by side, as groups of channels, and their values are normalised together.

Both are checked against plain BatchNorm in the tests.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from shoestring.bench.data import Images

_WIDTHS = (16, 32, 64)
_CLASSES = 10
_CHUNK = 1000  # images at a time

Norm = Callable[[int], nn.Module]  # by the channels of one replica


class Block(nn.Module):
    """Two 3 x 3 convolutions and a shortcut, for `replicas` nets side by side."""

    def __init__(self, inner: int, outer: int, stride: int, norm: Norm, replicas: int) -> None:
        super().__init__()
        self.conv1 = _conv(inner, outer, 3, stride, replicas)
        self.norm1 = norm(outer)
        self.conv2 = _conv(outer, outer, 3, 1, replicas)
        self.norm2 = norm(outer)
        self.shortcut: nn.Module = nn.Identity()
        if inner != outer or stride != 1:
            self.shortcut = nn.Sequential(_conv(inner, outer, 1, stride, replicas), norm(outer))

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.relu(self.norm1(self.conv1(x)))
        return nn.functional.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


def build_net(norm: Norm = nn.BatchNorm2d, replicas: int = 1) -> nn.Module:
    """Build the net: images [n, replicas, 28, 28] in, [n, replicas * 10] out; nine norms."""
    first, second, third = _WIDTHS
    return nn.Sequential(
        _conv(1, first, 3, 2, replicas),
        norm(first),
        nn.ReLU(),
        Block(first, first, 1, norm, replicas),
        Block(first, second, 2, norm, replicas),
        Block(second, third, 2, norm, replicas),
        nn.AdaptiveAvgPool2d(1),
        # A fully connected layer, in the form that has groups.
        nn.Conv2d(replicas * third, replicas * _CLASSES, 1, groups=replicas),
        nn.Flatten(),
    )


def _conv(inner: int, outer: int, kernel: int, stride: int, replicas: int) -> nn.Conv2d:
    return nn.Conv2d(
        replicas * inner, replicas * outer, kernel, stride, kernel // 2, groups=replicas, bias=False
    )


class LocalNorm(nn.Module):
    """BatchNorm of `workers` workers whose samples follow one another in the batch.

    Evaluation uses the mean of the workers' running statistics.
    """

    def __init__(self, channels: int, workers: int) -> None:
        super().__init__()
        self.workers = workers
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))
        self.norm = nn.BatchNorm2d(workers * channels, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            mean, variance = (rows.view(self.workers, -1).mean(0) for rows in _running(self.norm))
            return nn.functional.batch_norm(
                x, mean, variance, self.weight, self.bias, False, 0.0, self.norm.eps
            )
        samples, channels, height, width = x.shape
        split = (self.workers, samples // self.workers, channels, height, width)
        # [n, workers * C, H, W]: every worker has channels of its own.
        own = x.reshape(split).transpose(0, 1).reshape(split[1], -1, height, width)
        y = self.norm(own).reshape(split[1], split[0], *split[2:]).transpose(0, 1).reshape(x.shape)
        return _scale(y, self.weight, self.bias)


class JoinedNorm(nn.Module):
    """BatchNorm of replicas side by side, [n, replicas * C, H, W]: one batch, weights of their own."""

    def __init__(self, channels: int, replicas: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(replicas * channels))
        self.bias = nn.Parameter(torch.zeros(replicas * channels))
        self.norm = nn.BatchNorm2d(channels, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x.reshape(-1, self.norm.num_features, *x.shape[2:])).reshape(x.shape)
        return _scale(y, self.weight, self.bias)


def _running(norm: nn.BatchNorm2d) -> tuple[Tensor, Tensor]:
    mean, variance = norm.running_mean, norm.running_var
    assert mean is not None  # such layers are not built here
    assert variance is not None
    return mean, variance


def _scale(y: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return y * weight.view(-1, 1, 1) + bias.view(-1, 1, 1)


@torch.no_grad()
def spread(net: nn.Module, replicas: nn.Module, count: int) -> None:
    """Give `count` replicas side by side the parameters of one net."""
    for source, target in zip(net.parameters(), replicas.parameters(), strict=True):
        target.copy_(torch.cat([source] * count))


@torch.no_grad()
def average(replicas: nn.Module, count: int) -> None:
    """Give every one of the replicas side by side their mean parameters."""
    for parameter in replicas.parameters():
        own = parameter.view(count, -1)
        own.copy_(own.mean(0).expand_as(own))


@torch.no_grad()
def first_of(replicas: nn.Module) -> nn.Module:
    """The first of the replicas side by side as a plain net, with the statistics of all."""
    net = build_net()
    for source, target in zip(replicas.parameters(), net.parameters(), strict=True):
        target.copy_(source[: len(target)])
    for joined, norm in zip(_norms(replicas, JoinedNorm), _norms(net, nn.BatchNorm2d), strict=True):
        for running, told in zip(_running(norm), _running(joined.norm), strict=True):
            running.copy_(told)
    return net


def _norms(net: nn.Module, kind: type[Any]) -> list[Any]:
    return [module for module in net.modules() if isinstance(module, kind)]


def to_input(pixels: NDArray[np.uint8]) -> Tensor:
    """Images as the net takes them: [n, 1, 28, 28], with about mean 0 and deviation 1."""
    return (torch.from_numpy(pixels.astype(np.float32)).unsqueeze(1) / 255 - 0.286) / 0.353


@torch.no_grad()
def measure_accuracy(net: nn.Module, images: Images) -> float:
    """The share of images whose class the net tells, in evaluation."""
    net.train(False)
    right = 0
    for start in range(0, len(images.labels), _CHUNK):
        chunk = slice(start, start + _CHUNK)
        told = net(to_input(images.pixels[chunk])).argmax(1).numpy()
        right += int((told == images.labels[chunk]).sum())
    net.train(True)
    return right / len(images.labels)
