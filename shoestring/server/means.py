"""A part whose parameters the workers update themselves: the shard answers with the mean gradient.

`params` holds the parameters until the first round; workers start from them. From then on it is what
the last answer said, so that `full` repeats it. What a lossy answer leaves out is kept and added to
the mean of the next round, but for rounds whose gradient the workers threw away: then it goes on from
what was kept before (`Feedback.settle`).

Gradients of float64 parameters come and go in float64, where the codec loses nothing.

A mean that is not finite is sent as it is, in float32: every worker sees the same infinity and skips
its step, or does not, as it would with any other way to take the mean.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from shoestring.codec.base import Vector
from shoestring.codec.feedback import Feedback
from shoestring.codec.registry import LOSSLESS, codec_of
from shoestring.errors import NonFiniteError
from shoestring.model.parts import pack_used
from shoestring.server.holding import Holding, Reply


class MeanHolding(Holding):
    """The last mean gradient of one part, and what answers have left out of it."""

    is_mean = True
    _feedback: Feedback | None = None

    def advance(
        self,
        gradient: Vector,
        *,
        scale: float,
        hyper: Sequence[Sequence[float]],
        used: NDArray[np.bool_],
        codec: str,
        seq: int,
        slot: int = -1,
        fates: bytes = b"",
    ) -> Reply:
        """Scale a summed gradient (used up as scratch) to the mean, and answer with that."""
        self.version += 1
        if self._feedback is None and codec != LOSSLESS:
            self._feedback = Feedback(codec_of(codec), self.part.layout)
        if self._feedback is not None:
            self._feedback.settle(fates)
        gradient *= gradient.dtype.type(scale)
        if gradient.dtype == np.float64:
            if codec == LOSSLESS:
                return Reply(self.version, seq, LOSSLESS, True, gradient.view(np.uint8), used=pack_used(used))
            gradient = gradient.astype(np.float32)
        reply = None if self._feedback is None else self._code(gradient, self._feedback, codec, used, seq)
        if reply is None:
            self.params[:] = gradient
            reply = self.full(seq, slot)
        return replace(reply, used=pack_used(used))

    def _code(
        self, mean: Vector, feedback: Feedback, codec: str, used: NDArray[np.bool_], seq: int
    ) -> Reply | None:
        """Code the mean with what was kept; nothing if it is not finite, and nothing is changed then."""
        if not np.isfinite(mean.sum()) and not np.isfinite(mean).all():
            return None
        ranges = list(pairwise(self.part.layout.offsets))
        spared = [ranges[piece] for piece in np.flatnonzero(~used).tolist()]
        came_in = mean + feedback.waiting
        for start, stop in spared:  # the workers will not look at them
            came_in[start:stop] = 0
        feedback.codec = codec_of(codec)
        try:
            payload = feedback.encode_total(came_in, spared)
        except NonFiniteError:
            return None
        feedback.codec.decode(payload, self.part.layout, self.params)
        is_full = codec == LOSSLESS
        return Reply(self.version, seq, LOSSLESS if is_full else feedback.codec.spec, is_full, payload)
