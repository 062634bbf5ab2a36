"""The norm of a round's mean gradient over all parts, from which every worker works out the same scale.

Each shard tells the sum of squares of its parts; a worker that has heard of all parts tells all
shards the scale to clip by. A shard that has not heard the scale tells its part's norm again.
"""

import math

from shoestring.wire.messages import Scale

_ROUNDS = 4  # that are remembered


class Norms:
    """What is known of the norms of the last rounds."""

    def __init__(self, clip_norm: float, parts: int) -> None:
        self._clip_norm = clip_norm
        self._parts = parts
        self._squares: dict[int, dict[int, float]] = {}  # by round, by part

    def knows(self, seq: int, part: int) -> bool:
        """Say whether a part's norm has come in."""
        return part in self._squares.get(seq, ())

    def add(self, seq: int, part: int, squares: float) -> Scale | None:
        """Note a part's norm; return the scale if all norms of the round are known."""
        known = self._squares.setdefault(seq, {})
        known.setdefault(part, squares)
        if len(known) < self._parts:
            return None
        norm = math.sqrt(sum(known[index] for index in range(self._parts)))
        self._squares = {key: value for key, value in self._squares.items() if key >= seq - _ROUNDS}
        return Scale(seq, min(1.0, self._clip_norm / (norm + 1e-6)))
