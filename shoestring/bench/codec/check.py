"""What must be right about a codec before it is worth a stopwatch."""

import copy
import math
from dataclasses import asdict, dataclass

import numpy as np

from shoestring.bench.codec.gradients import Bucket
from shoestring.codec.base import Codec, Layout, Payload, Vector
from shoestring.codec.dct import Dct
from shoestring.codec.options import ConfiguredCodec
from shoestring.errors import CodecError

# What the NumPy definition gets to decode: it is written to be read, not to be fast.
_SLICE_TENSORS, _SLICE_VALUES = 6, 4096
# A codec that mixes elements rounds its input to a fine grid first; this is far above that.
_GRID_ERROR = 1e-4


@dataclass(frozen=True)
class Coded:
    """A bucket's payload and what it decodes to."""

    payload: Payload
    values: Vector


def normalised_error(found: Vector, wanted: Vector, layout: Layout) -> float:
    """Return the squared error over the energy of each tensor, averaged over all values.

    Each tensor counts by its size, whatever its scale: codecs choose their steps
    relative to a tensor's rms, and a layer with small gradients matters as much as
    one with large ones. A tensor without energy counts as 0 if it came back as
    zeros, and as 1 if it did not.
    """
    total = 0.0
    for start, size in zip(layout.offsets, layout.sizes, strict=False):
        if not size:
            continue
        true = wanted[start : start + size].astype(np.float64)
        error = np.square(found[start : start + size] - true).sum()
        energy = np.square(true).sum()
        total += size * float(error / energy if energy else error > 0)
    return total / max(layout.total, 1)


def verify(codec: Codec, bucket: Bucket) -> Coded:
    """Encode and decode a bucket; raise `CodecError` unless all that a codec promises holds."""
    values, layout = bucket.values, bucket.layout

    def require(condition: bool, problem: str) -> None:
        if not condition:
            raise CodecError(
                f"`{codec.spec}` is not timed on `{bucket.name}`: {problem}",
                hint="a wrong codec has no speed; `pytest tests/unit/codec` shows more",
            )

    # Poisoned: what a codec forgets to write shows.
    left_over, decoded = np.full_like(values, np.nan), np.full_like(values, np.nan)
    payload = codec.encode(values, layout)
    require(payload.nbytes <= codec.max_bytes(layout), f"{payload.nbytes} bytes are above its limit")
    require(_same_bytes(payload, codec.encode(values, layout)), "a second encoding gives other bytes")
    require(_same_bytes(payload, codec.encode(values, layout, left_over)), "feedback changes the bytes")
    if isinstance(codec, ConfiguredCodec) and codec.threads > 1:
        alone = copy.copy(codec)
        alone.threads = 1
        require(_same_bytes(payload, alone.encode(values, layout)), "one thread gives other bytes")

    codec.decode(payload, layout, decoded)
    require(bool(np.isfinite(decoded).all()), "it decodes to NaN or infinity")
    require(_has_exact_sum(decoded, left_over), "what is sent plus what is left over is rounded")
    error = normalised_error(decoded + left_over, values, layout)
    require(error <= _GRID_ERROR, f"what is sent plus what is left over is off by {error:.3g}")

    added = np.zeros_like(values)
    codec.decode(payload, layout, added, 1.0)
    require(np.array_equal(added, decoded), "adding onto zeros is not setting")
    added[:] = values
    codec.decode(payload, layout, added, 0.5)  # a power of two: only the sum rounds
    require(np.array_equal(added, values + np.float32(0.5) * decoded), "adding with a weight is not adding")

    require(_equals_reference(codec, bucket), "it does not decode to the bits of the NumPy definition")
    return Coded(payload, decoded)


def cut(bucket: Bucket) -> Bucket:
    """Return the first values of the largest and of some other tensors, in shapes as close as can be."""
    sizes = np.array(bucket.layout.sizes, np.int64)
    spread = np.linspace(0, max(sizes.size - 1, 0), _SLICE_TENSORS).astype(int)
    chosen = {*np.argsort(-sizes, kind="stable")[:_SLICE_TENSORS].tolist(), *spread[: sizes.size].tolist()}
    tensors = []
    for index in sorted(chosen):
        start, shape = bucket.layout.offsets[index], bucket.layout.shapes[index]
        row = math.prod(shape[1:])
        rows = min(shape[0] if shape else 1, _SLICE_VALUES // row if row else 0)
        smaller = (rows, *shape[1:]) if rows else (min(bucket.layout.sizes[index], _SLICE_VALUES),)
        tensors.append(bucket.values[start : start + math.prod(smaller)].reshape(smaller))
    return Bucket.of(bucket.name, tensors)


def _equals_reference(codec: Codec, bucket: Bucket) -> bool:
    if not isinstance(codec, Dct):
        return True
    small = cut(bucket)
    definition = Dct(backend="numpy", **asdict(codec.options))
    found, wanted = np.empty_like(small.values), np.empty_like(small.values)
    for encoder in (codec, definition):
        payload = encoder.encode(small.values, small.layout)
        codec.decode(payload, small.layout, found)
        definition.decode(payload, small.layout, wanted)
        if not np.array_equal(found.view(np.uint32), wanted.view(np.uint32)):
            return False
    return True


def _same_bytes(one: Payload, other: Payload) -> bool:
    return one.tobytes() == other.tobytes()


def _has_exact_sum(a: Vector, b: Vector) -> bool:
    """Say whether `a + b` has no rounding: Knuth's two-sum yields the rounding itself, exactly."""
    total = a + b
    part = total - a
    rounding = (a - (total - part)) + (b - part)
    return not rounding.any()
