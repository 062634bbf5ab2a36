"""The vectors of a part as one payload, by name: what workers put on a shard, and what they ask it for.

`params` are its parameters and `steps` the updates of each piece so far; the rest is the optimizer's
state, under the names of the rule. All are float32 and as long as the part, but for `steps`: int64, one
for each piece. A payload holds them end to end, in the order of the names.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from shoestring.codec.base import Vector
from shoestring.errors import WireError
from shoestring.model.parts import Part
from shoestring.model.rules import Rule

PARAMS, STEPS = "params", "steps"
STEP_LIMIT = 1 << 48

Vectors = dict[str, NDArray[Any]]


def state_names(rule: Rule) -> tuple[str, ...]:
    """The names of all that a rule keeps from step to step."""
    return (STEPS, *rule.state_names)


def checksums_of(values: Vector, part: Part) -> bytes:
    """The CRC-32C of each piece of a part, four bytes each."""
    octets = np.ascontiguousarray(values).view(np.uint8)
    sums = [
        google_crc32c.extend(0, octets[4 * start : 4 * stop]) if stop > start else 0
        for start, stop in pairwise(part.layout.offsets)
    ]
    return np.array(sums, "<u4").tobytes()


def pack(vectors: Mapping[str, NDArray[Any]]) -> memoryview:
    """Copy vectors into one payload, in the order of the mapping."""
    return memoryview(
        b"".join(np.ascontiguousarray(vector).view(np.uint8).data for vector in vectors.values())
    )


def unpack(names: Sequence[str], payload: memoryview, part: Part, rule: Rule) -> Vectors:
    """The vectors of a payload, which are views of it; raise unless it holds what the names say."""
    known = (PARAMS, *state_names(rule))
    if len(set(names)) != len(names) or not set(names) <= set(known):
        raise WireError(f"vectors {list(names)} of part {part.index}", hint="check both sides' versions")
    kinds = [np.dtype(np.int64) if name == STEPS else np.dtype(np.float32) for name in names]
    counts = [len(part.pieces) if name == STEPS else part.size for name in names]
    sizes = [kind.itemsize * count for kind, count in zip(kinds, counts, strict=True)]
    if payload.nbytes != sum(sizes):
        raise WireError(
            f"{payload.nbytes} bytes of {list(names)} of part {part.index}, expected {sum(sizes)}",
            hint="check both sides' versions",
        )
    vectors: Vectors = {}
    start = 0
    for name, kind, size in zip(names, kinds, sizes, strict=True):
        vectors[name] = np.frombuffer(payload[start : start + size], kind)
        start += size
    steps = vectors.get(STEPS)
    if steps is not None and steps.size and not 0 <= steps.min() <= steps.max() <= STEP_LIMIT:
        raise WireError(f"step counts of part {part.index} out of range", hint="check both sides' versions")
    return vectors
