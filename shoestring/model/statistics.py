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
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import msgspec
import numpy as np
from numpy.typing import NDArray

from shoestring.errors import WireError
from shoestring.model import statkernels as kernels
from shoestring.model.layers import Layer

_PROBLEMS = {
    kernels.BAD_MOMENT: "a mean or variance that is not finite, negative, or out of range",
    kernels.BAD_WEIGHT: "statistics of more steps than are remembered",
    kernels.BAD_COUNT: "a count of values that is out of range, or of no step",
    kernels.BAD_SLOPE: "a slope that is out of range",
}

Doubles = NDArray[np.float64]


@dataclass(frozen=True)
class Statistics:
    """Of some batches of a part's layers: [L] a layer, [C] a channel of all layers in order."""

    weight: Doubles  # [L]
    count: Doubles  # [L]
    mean: Doubles  # [C]
    variance: Doubles  # [C], biased
    shift: Doubles  # [C]
    scale: Doubles  # [C]

    @property
    def arrays(self) -> tuple[Doubles, ...]:
        return (self.weight, self.count, self.mean, self.variance, self.shift, self.scale)


def nothing(layers: int, channels: int) -> Statistics:
    """Statistics to be filled in."""
    return Statistics(np.empty(layers), np.empty(layers), *np.empty((4, channels)))


def pack(statistics: Statistics, layers: Sequence[Layer]) -> bytes:
    """Write statistics as they travel; nothing where there are no layers."""
    if not layers:
        return b""
    form = form_of(tuple(layers))
    data = np.empty(form.bytes, np.uint8)
    floats, small = data[: form.split].view("<f4"), data[form.split :].view(np.int8)
    kernels.write(*statistics.arrays, form.widths, floats, small)
    return data.tobytes()


def unpack(data: bytes, layers: Sequence[Layer]) -> Statistics:
    """Read statistics; whatever a shard could not add to its own is refused."""
    form = form_of(tuple(layers))
    if len(data) != form.bytes:
        raise _bad(f"{len(data)} bytes of statistics, expected {form.bytes}")
    found = nothing(form.layers, form.channels)
    floats = np.frombuffer(data, "<f4", form.split // 4)
    small = np.frombuffer(data, np.int8, offset=form.split)
    problem = kernels.read(floats, small, form.widths, form.longest, *found.arrays)
    if problem:
        raise _bad(_PROBLEMS[problem])
    return found


@dataclass(frozen=True)
class Form:
    """How the statistics of some layers travel."""

    layers: int
    channels: int
    widths: NDArray[np.int64]  # of each layer
    longest: Doubles  # the steps that each layer remembers
    split: int  # where floats end and small numbers begin
    bytes: int


@lru_cache(maxsize=4096)
def form_of(layers: tuple[Layer, ...]) -> Form:
    widths = np.array([layer.channels for layer in layers], np.int64)
    longest = np.array([1 / (1 - layer.keep) for layer in layers]) * (1 + 1e-6)
    both = len(layers) + int(widths.sum())
    return Form(len(layers), both - len(layers), widths, longest, 8 * both, 10 * both)


class History:
    """The sums of one part's layers. Not thread-safe: one round at a time works on it."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self.layers = tuple(layers)
        self._keep = np.array([layer.keep for layer in layers])
        self._form = form_of(self.layers)
        count, channels = self._form.layers, self._form.channels
        # [2L + 4C]: weight and count of each layer; sums of values, squares and slopes of each channel.
        self.sums: Doubles = np.zeros(2 * count + 4 * channels)
        self._weight, self._count = self.sums[:count], self.sums[count : 2 * count]
        self._totals = self.sums[2 * count :].reshape(4, channels)

    def take(self, batches: Sequence[Statistics], share: float) -> None:
        """Add what workers have seen; `share` is the part of a step that one of them stands for."""
        if not self.layers or not batches:
            return
        self.fade(share * sum((batch.weight for batch in batches), np.zeros(len(self.layers))))
        for batch in batches:
            kernels.add(self._count, self._totals, self._form.widths, *batch.arrays[1:])

    def fade(self, steps: Doubles) -> None:
        """Let so many steps go by for each layer; what was seen in them is added afterwards."""
        kernels.fade(self._weight, self._count, self._totals, self._form.widths, self._keep, steps)

    def statistics(self) -> Statistics:
        """What the sums come to; zeros for a layer that has seen nothing."""
        found = nothing(self._form.layers, self._form.channels)
        found.weight[:], found.count[:] = self._weight, self._count
        kernels.divide(self._count, self._totals, self._form.widths, *found.arrays[2:])
        return found

    def pack(self) -> bytes:
        return pack(self.statistics(), self.layers) if self.layers else b""

    @property
    def digest(self) -> str:
        """Names its layers: sums of one history fit another if these are equal."""
        return hashlib.sha256(msgspec.json.encode(self.layers)).hexdigest()[:16]


def _bad(what: str) -> WireError:
    return WireError(what, hint="check both sides' versions")


def warm_up_history() -> None:
    """Load or compile what is done with the statistics of layers in a round."""
    history = History((Layer("", 1, 0, 0.5),))
    history.take([unpack(history.pack(), history.layers)], 1.0)
