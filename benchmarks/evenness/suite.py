"""How evenly known models are spread over 2 to 16 shards, from their shapes alone."""

import math
from dataclasses import dataclass

from benchmarks.evenness.shapes import MODELS
from shoestring.model.parts import assign, cut

SHARDS = range(2, 17)


@dataclass(frozen=True)
class Row:
    """One model on so many shards."""

    model: str
    values: int
    parts: int
    shards: int
    max_over_mean: float  # what the shard with the most holds


def measure() -> list[Row]:
    """Deal the parts of every model to every number of shards."""
    rows = []
    for model, make in MODELS.items():
        shapes = make()
        values, parts = sum(map(math.prod, shapes)), cut(shapes)
        for shards in SHARDS:
            loads = [0] * shards
            for part, home in zip(parts, assign(parts, shards), strict=True):
                loads[home] += part.size
            rows.append(Row(model, values, len(parts), shards, round(max(loads) * shards / values, 4)))
    return rows
