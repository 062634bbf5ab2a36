"""What the BatchNorm layers of all workers have seen lately, kept beside the parameters.

A layer's statistics travel with the part that holds its weight, in the same messages and
under the same ledger: a batch counts if and only if the push that carries it counts.

Per layer there are a count of values and a weight (how many steps it stands for); per
channel the mean and the variance of the layer's input, and two slopes of the loss: its
mean derivative by a normalised value (`shift`), and that times the value (`scale`). A
worker sends those of its own batches since the last push. A shard keeps exponentially
weighted sums over the batches of all workers, in float64 and in the order of the
workers; after a step a share `keep` of the former sums is left. A step counts for every
layer, also for those it did not use: so all sides know, without being told, how much of
a batch is left.

Both ways a layer takes 10 bytes, and 10 a channel: mean and variance are float32; the
slopes, which are noisy and need no more, are bytes times a power of two of their layer.
What `pack` writes, `unpack` takes: one worker's strange values never stop the others.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import msgspec
import numpy as np
from numpy.typing import NDArray

from shoestring.errors import WireError

CHANNEL_LIMIT = 1 << 16  # of a part's layers together: they travel in one header
TOTAL_LIMIT = 1 << 22  # of all layers together, and of layers
COUNT_LIMIT = 2.0**40
MEAN_LIMIT = 2.0**60  # beyond it the sums that normalise would leave float32
VARIANCE_LIMIT = MEAN_LIMIT**2
_EXPONENTS = (-120, 100)
_TINY = float(np.finfo(np.float64).tiny)

Doubles = NDArray[np.float64]


class Layer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One BatchNorm layer as all workers and shards must agree on it."""

    name: str
    channels: int
    tensor: int  # the parameter whose part carries its statistics
    keep: float  # how much of the history is left after a step


@dataclass(frozen=True)
class Statistics:
    """Of some batches of a part's layers: [L] a layer, [C] a channel of all layers in order."""

    weight: Doubles  # [L]
    count: Doubles  # [L]
    mean: Doubles  # [C]
    variance: Doubles  # [C], biased
    shift: Doubles  # [C]
    scale: Doubles  # [C]


def pack(statistics: Statistics, layers: Sequence[Layer]) -> bytes:
    """Write statistics as they travel; nothing where there are no layers."""
    if not layers:
        return b""
    exponents, slopes = _quantise(statistics, layers)
    count = np.minimum(statistics.count, COUNT_LIMIT)
    mean = np.minimum(np.maximum(statistics.mean, -MEAN_LIMIT), MEAN_LIMIT)
    variance = np.minimum(statistics.variance, VARIANCE_LIMIT)
    floating = np.concatenate([statistics.weight, count, mean, variance], dtype="<f4", casting="same_kind")
    return floating.tobytes() + exponents.tobytes() + slopes.tobytes()


def unpack(data: bytes, layers: Sequence[Layer]) -> Statistics:
    """Read statistics; whatever a shard could not add to its own is refused."""
    form = _form(tuple(layers))
    total, channels = form.layers, form.channels
    if len(data) != 10 * (total + channels):
        raise _bad(f"{len(data)} bytes of statistics, expected {10 * (total + channels)}")
    with np.errstate(invalid="ignore"):  # a NaN that signals; it is refused below
        floats = np.frombuffer(data, "<f4", 2 * (total + channels)).astype(np.float64)
    # Comparisons are false for NaN.
    if not ((floats >= form.least) & (floats <= form.most)).all():
        raise _bad("a mean, a variance, a count or a number of steps that is out of range or not finite")
    weight, count = floats[:total], floats[total : 2 * total]
    mean, variance = floats[2 * total : 2 * total + channels], floats[2 * total + channels :]
    if not (count[weight == 0] == 0).all():
        raise _bad("a count of values of no step")
    small = np.frombuffer(data, np.int8, offset=8 * (total + channels))
    exponents, codes = small[: 2 * total].reshape(2, total), small[2 * total :].reshape(2, channels)
    if ((exponents < _EXPONENTS[0]) | (exponents > _EXPONENTS[1])).any():
        raise _bad("a slope that is out of range")
    shift, scale = codes * np.exp2(exponents.astype(np.float64))[:, form.layer_of]
    return Statistics(weight, count, mean, variance, shift, scale)


@dataclass(frozen=True)
class _Form:
    """How the statistics of some layers travel, and within which limits."""

    layers: int
    channels: int
    layer_of: NDArray[np.int64]  # of each channel
    starts: NDArray[np.int64]  # the first channel of each layer
    least: Doubles  # of weights, counts, means and variances
    most: Doubles


@lru_cache(maxsize=4096)
def _form(layers: tuple[Layer, ...]) -> _Form:
    widths = [layer.channels for layer in layers]
    total, channels = len(layers), sum(widths)
    steps = [(1 + 1e-6) / (1 - layer.keep) for layer in layers]
    limits = (COUNT_LIMIT,) * total + (MEAN_LIMIT,) * channels + (VARIANCE_LIMIT,) * channels
    return _Form(
        layers=total,
        channels=channels,
        layer_of=np.repeat(np.arange(total), widths),
        starts=np.cumsum([0, *widths[:-1]]),
        least=np.array([0.0] * 2 * total + [-MEAN_LIMIT] * channels + [0.0] * channels),
        most=np.array([*steps, *limits]),
    )


class History:
    """The sums of one part's layers. Not thread-safe: one round at a time works on it."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self.layers = tuple(layers)
        self._keep = np.array([layer.keep for layer in layers])
        channels = sum(layer.channels for layer in layers)
        # [2L + 4C]: weight and count of each layer; sums of values, squares and slopes of each channel.
        self.sums: Doubles = np.zeros(2 * len(layers) + 4 * channels)
        edges = [len(layers), 2 * len(layers), *(2 * len(layers) + i * channels for i in (1, 2, 3))]
        self._weight, self._count, *self._totals = np.split(self.sums, edges)

    def take(self, batches: Sequence[Statistics], share: float) -> None:
        """Add what workers have seen; `share` is the part of a step that one of them stands for."""
        if not self.layers or not batches:
            return
        self.fade(share * sum((batch.weight for batch in batches), np.zeros(len(self.layers))))
        for batch in batches:
            self._count += batch.count
            n = spread(batch.count, self.layers)
            square = batch.variance + batch.mean * batch.mean
            for total, value in zip(
                self._totals, (batch.mean, square, batch.shift, batch.scale), strict=True
            ):
                total += n * value

    def fade(self, steps: Doubles | float) -> None:
        """Let so many steps go by; what was seen in them is added afterwards."""
        steps = np.minimum(steps, 1 / (1 - self._keep))
        left = 1 - (1 - self._keep) * steps
        self._weight[:] = left * self._weight + steps
        self._count *= left
        wide = spread(left, self.layers)
        for total in self._totals:
            total *= wide

    def statistics(self) -> Statistics:
        """What the sums come to; zeros for a layer that has seen nothing."""
        n = np.maximum(spread(self._count, self.layers), _TINY)
        mean, square, shift, scale = (total / n for total in self._totals)
        variance = np.maximum(square - mean * mean, 0)
        return Statistics(self._weight.copy(), self._count.copy(), mean, variance, shift, scale)

    def pack(self) -> bytes:
        return pack(self.statistics(), self.layers) if self.layers else b""

    @property
    def digest(self) -> str:
        """Names its layers: sums of one history fit another if these are equal."""
        return hashlib.sha256(msgspec.json.encode(self.layers)).hexdigest()[:16]


def spread(values: Doubles, layers: Sequence[Layer]) -> Doubles:
    """Values of layers, [..., L], as values of their channels, [..., C]."""
    return values[..., _form(tuple(layers)).layer_of]


def _quantise(statistics: Statistics, layers: Sequence[Layer]) -> tuple[NDArray[np.int8], NDArray[np.int8]]:
    """Slopes as bytes times a power of two of each layer: [2, L] exponents and [2, C] codes."""
    slopes = np.stack([statistics.shift, statistics.scale])
    form = _form(tuple(layers))
    largest = np.maximum.reduceat(np.abs(slopes), form.starts, axis=1)  # [2, L]
    # So that the largest is below 128.
    exponents = np.minimum(np.maximum(np.frexp(largest)[1] - 7, _EXPONENTS[0]), _EXPONENTS[1])
    steps = np.exp2(exponents.astype(np.float64))[:, form.layer_of]
    codes = np.minimum(np.maximum(np.rint(slopes / steps), -127), 127)
    return exponents.astype(np.int8), codes.astype(np.int8)


def check_layers(layers: Sequence[Layer], tensors: int) -> str:
    """Say what is wrong with the layers of a table; empty if nothing is."""
    if sum(1 + max(layer.channels, 0) for layer in layers) > TOTAL_LIMIT:
        return f"{len(layers)} layers have more channels than are taken"
    for layer in layers:
        if not 0 <= layer.tensor < tensors or not 1 <= layer.channels <= CHANNEL_LIMIT:
            return f"layer `{layer.name}` has {layer.channels} channels and parameter {layer.tensor}"
        if not 0 <= layer.keep < 1 or math.isnan(layer.keep):
            return f"layer `{layer.name}` keeps {layer.keep} of its history"
    return ""


def _bad(what: str) -> WireError:
    return WireError(what, hint="check both sides' versions")
