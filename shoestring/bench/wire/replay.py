"""What the parameters of a run must be after some rounds, in one plain loop.

No shards, no messages, no threads: NumPy's arithmetic and the codec. A run over the
network has to give the same bits.
"""

import hashlib

import numpy as np

from shoestring.bench.wire import likeness
from shoestring.codec.base import Codec, Layout, Vector
from shoestring.codec.feedback import Feedback
from shoestring.codec.registry import LOSSLESS, make
from shoestring.model.parts import cut

RATE, MOMENTUM = 0.05, 0.9  # of the SGD that all runs here train with


def digest(values: int, codec: str, workers: int, rounds: int) -> str:
    """The hash of all parameters after so many rounds of SGD with momentum."""
    params = likeness.parameters(values)
    sources = [likeness.Gradients(values, worker) for worker in range(workers)]
    held, start = [], 0
    for part in cut(likeness.shapes(values)):
        own = slice(start, start + part.size)
        held.append((own, _Part(params[own], part.layout, make(codec), workers)))
        start += part.size
    for number in range(1, rounds + 1):
        gradients = [source.of(number) for source in sources]
        for own, held_part in held:
            held_part.advance([gradient[own] for gradient in gradients])
    return hashlib.sha256(params.data).hexdigest()


class _Part:
    """The values that travel together, and what is kept of them on all sides."""

    def __init__(self, params: Vector, layout: Layout, codec: Codec, workers: int) -> None:
        self._params, self._layout, self._codec = params, layout, codec
        self._feedback = [Feedback(codec, layout) for _ in range(workers)]
        self._buffer, self._kept = np.zeros_like(params), np.zeros_like(params)

    def advance(self, gradients: list[Vector]) -> None:
        """Do one round."""
        codec, layout, params = self._codec, self._layout, self._params
        is_lossless = codec.name == LOSSLESS
        total, decoded = np.zeros_like(params), np.empty_like(params)
        for feedback, gradient in zip(self._feedback, gradients, strict=True):
            if not is_lossless:
                codec.decode(feedback.encode(gradient), layout, decoded)
            total += gradient if is_lossless else decoded
        self._buffer *= np.float32(MOMENTUM)
        self._buffer += np.float32(1 / len(gradients)) * total
        update = np.float32(-RATE) * self._buffer
        if is_lossless:
            params += update
            return
        update += self._kept
        kept = np.empty_like(update)
        codec.decode(codec.encode(update, layout, kept), layout, params, 1.0)
        self._kept = kept
