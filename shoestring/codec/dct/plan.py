"""Choose, for each tensor of a bucket: its form, its step and the size of its chunks.

The form is small floats, blocks of n x n, or no transform, whichever the sample shows
to be cheapest in rate and error together. The step follows from the tensor's rms, or
from a budget of bits (`codec/rate.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from shoestring.codec.base import Layout
from shoestring.codec.dct import format as stream
from shoestring.codec.dct.steps import MAX_STEPS, nearest
from shoestring.codec.rate import RATE_WEIGHT, common_step

# A chunk of about this many bits: long enough for its header to be nothing, short
# enough for many to be coded at once.
CHUNK_BITS = 8192
# The transform must win by this much: codes of plain values cluster more than a short sample shows.
ADVANTAGE = 0.97


class Costs(Protocol):
    """A sample of one tensor in one form."""

    def cost(self, step: float) -> tuple[float, float]:
        """Return (bits, squared error in units of step squared), both a value."""
        ...


@dataclass(frozen=True)
class Choice:
    """What may become of one tensor: the samples of its candidate block sizes."""

    size: int
    rms: float
    samples: Sequence[tuple[int, Costs]]  # (n, sample)

    def best(self, relative_step: float) -> tuple[int, float, float]:
        """Return (n, bits a value, squared error over energy) of the best form at a step."""
        chosen, lowest = (1, 0.0, 1.0), np.inf
        for n, sample in self.samples:
            bits, error = sample.cost(relative_step * self.rms)
            loss = (error + RATE_WEIGHT * bits) * (ADVANTAGE if n > 1 else 1.0)
            if loss < lowest:
                chosen, lowest = (n, bits, error * relative_step**2), loss
        return chosen


def natural_block(shape: tuple[int, ...], default: int) -> int:
    """Return the block that fits a tensor: its kernel, if it is a square convolution."""
    if len(shape) >= 4 and shape[-1] == shape[-2] and shape[-1] in stream.BLOCKS and shape[-1] > 1:
        return shape[-1]
    return default


def chunk_log2(bits_a_value: float) -> int:
    """Return the log2 of the chunk size that gives about `CHUNK_BITS`."""
    wanted = round(float(np.log2(CHUNK_BITS / max(bits_a_value, 1e-6))))
    return int(np.clip(wanted, stream.MIN_CHUNK_LOG2 + 2, stream.MAX_CHUNK_LOG2))


def empty_headers(layout: Layout) -> NDArray[np.void]:
    return np.zeros(len(layout.sizes), stream.TENSOR)


def fill_header(header: NDArray[np.void], choice: Choice, largest: float, relative_step: float) -> None:
    """Write one tensor's header for the step that was chosen."""
    n, bits, _ = choice.best(relative_step)
    step = max(relative_step * choice.rms, largest / MAX_STEPS)
    mantissa, exponent = nearest(np.array(step))
    header["kind"] = stream.kind_of_block(n)
    header["chunk_log2"] = chunk_log2(bits)
    header["mantissa"] = mantissa
    header["exponent"] = exponent


def relative_step_of(choices: Sequence[Choice], step: float, bits: float | None, spent_bits: float) -> float:
    """Return the step over rms: `step` itself, or the one that meets a budget of bits a value."""
    if bits is None or not choices:
        return step
    values = sum(choice.size for choice in choices)
    return common_step(
        lambda relative: sum(choice.size * choice.best(relative)[1] for choice in choices),
        budget_bits=max(bits * values - spent_bits, 0.0),
    )
