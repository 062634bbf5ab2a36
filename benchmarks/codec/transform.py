"""What the transform buys: bits a value at an equal error, with and without it.

Rates at one step say little, as a step means another error in another domain. So the
step (for top-k: the share that is sent) is searched at which a codec leaves exactly
the error asked for, and the bits it takes there are compared. The bits are those of
real payloads, headers and small tensors included.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from shoestring.bench.codec.check import normalised_error
from shoestring.bench.codec.gradients import Bucket
from shoestring.bench.codec.report import print_table
from shoestring.codec import registry

ERRORS = (0.5, 0.25, 0.1)
_HALVINGS = 12


@dataclass(frozen=True)
class EqualError:
    """Bits a value that leave one normalised error (`check.normalised_error`) on one bucket.

    None where no step reaches the error. A ratio below 1 says that `dct` takes fewer bits.
    """

    gradients: str
    nmse: float
    dct: float | None
    dct_block_8: float | None
    never: float | None  # `dct:transform=never`
    topk: float | None
    dct_over_never: float | None
    dct_block_8_over_never: float | None
    dct_over_topk: float | None


def compare(bucket: Bucket, nmse: float) -> EqualError:
    """Find the bits of each codec at one error."""
    dct = bits_at(bucket, nmse, lambda x: f"dct:step={x}", *_STEPS)
    block_8 = bits_at(bucket, nmse, lambda x: f"dct:block=8,step={x}", *_STEPS)
    never = bits_at(bucket, nmse, lambda x: f"dct:transform=never,step={x}", *_STEPS)
    topk = bits_at(bucket, nmse, lambda x: f"topk:ratio={1 / x}", *_PERIODS)
    return EqualError(
        gradients=bucket.name,
        nmse=nmse,
        dct=dct,
        dct_block_8=block_8,
        never=never,
        topk=topk,
        dct_over_never=_ratio(dct, never),
        dct_block_8_over_never=_ratio(block_8, never),
        dct_over_topk=_ratio(dct, topk),
    )


_STEPS = (2.0**-7, 2.0**6)
_PERIODS = (1.0, 2.0**16)  # one of so many values is sent


def bits_at(
    bucket: Bucket, nmse: float, spec_of: Callable[[float], str], low: float, high: float
) -> float | None:
    """Bisect the knob of a codec, from fine to coarse, for the bits a value at an error."""
    error_low, bits_low = _try(bucket, spec_of(low))
    error_high, bits_high = _try(bucket, spec_of(high))
    if not error_low <= nmse <= error_high:
        return None
    for _ in range(_HALVINGS):
        middle = math.sqrt(low * high)
        error, bits = _try(bucket, spec_of(middle))
        if error <= nmse:
            low, error_low, bits_low = middle, error, bits
        else:
            high, error_high, bits_high = middle, error, bits
    share = (nmse - error_low) / (error_high - error_low) if error_high > error_low else 0.0
    return bits_low + share * (bits_high - bits_low)


def _try(bucket: Bucket, spec: str) -> tuple[float, float]:
    """Return the error and the bits a value of a codec."""
    codec = registry.make(spec)
    decoded = np.empty_like(bucket.values)
    payload = codec.encode(bucket.values, bucket.layout)
    codec.decode(payload, bucket.layout, decoded)
    bits = 8 * payload.nbytes / bucket.values.size
    return normalised_error(decoded, bucket.values, bucket.layout), bits


def _ratio(one: float | None, other: float | None) -> float | None:
    return one / other if one is not None and other else None


def show(results: Sequence[EqualError]) -> None:
    """Print a table."""
    print_table(
        "bits a value at an equal error",
        ("gradients", "error", "dct", "dct:block=8", "never", "topk", "dct over\nnever", "dct over\ntopk"),
        [
            (
                *(one.gradients, f"{one.nmse:g}"),
                *(_write(bits, "none", ".3g") for bits in (one.dct, one.dct_block_8, one.never, one.topk)),
                *(_write(ratio, "", ".2f") for ratio in (one.dct_over_never, one.dct_over_topk)),
            )
            for one in results
        ],
    )


def _write(value: float | None, absent: str, form: str) -> str:
    return absent if value is None else format(value, form)
