"""`Feedback` for gradients on a GPU; its vector `kept` lies there too.

Promises what `codec/feedback.py` promises, with the same arithmetic: after the same stream both
have the same bits in `kept`. Only the packed bytes reach the host.
"""

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from shoestring.codec.base import Layout, Payload, Vector
from shoestring.codec.dct.gpu.codec import GpuDct
from shoestring.codec.feedback import ranges
from shoestring.wire.messages import DISCARDED


class GpuFeedback:
    """Encodes one bucket's gradients, step after step, losing nothing.

    Holds as much memory on the device as the bucket. Not thread-safe; a call on another stream
    than the one before must wait for that. `encode_total` returns when its stream is done.
    """

    def __init__(self, layout: Layout, device: torch.device, kept: Vector | None = None) -> None:
        self.layout = layout
        self.device = device
        self._kept = torch.zeros(layout.total, device=device)
        self._sure: Tensor | None = None
        if kept is not None:
            self._kept.copy_(torch.from_numpy(kept + np.float32(0)))

    @property
    def kept(self) -> Vector:
        """The values that have not been sent yet: a copy on the host."""
        copy: Vector = self._kept.cpu().numpy().copy()
        return copy

    @property
    def waiting(self) -> Tensor:
        """The same values on the GPU, without a copy; callers must not change them."""
        return self._kept

    def encode_total(self, codec: GpuDct, came_in: Tensor, spared: Iterable[tuple[int, int]] = ()) -> Payload:
        """Encode a vector that already contains `kept`; what the payload leaves over becomes `kept`.

        Where a range is spared, `kept` stays as it is.
        """
        left_over = torch.empty_like(came_in)
        payload: Payload = codec.encode(came_in, self.layout, left_over).numpy()
        for start, stop in spared:
            left_over[start:stop] = self._kept[start:stop]
        self._kept = left_over  # only now: a vector that is refused changes nothing
        return payload

    def settle(self, fates: bytes) -> None:
        """Say what became of the gradients coded so far, a fate for each tensor; empty: all were taken."""
        if self._sure is None or not fates:
            self._sure = self._kept.clone()
            return
        for start, stop, fate in ranges(fates, self.layout):
            if fate == DISCARDED:
                self._kept[start:stop] = self._sure[start:stop]
            else:
                self._sure[start:stop] = self._kept[start:stop]

    def lend(self, values: Tensor) -> None:
        """Add `kept` to a vector; the rounding errors of the sums become `kept`."""
        own = values.clone()
        values.add_(self._kept)
        added = values - own
        self._kept = (own - (values - added)) + (self._kept - added)  # exact: Knuth's sum of two

    def add(self, values: Tensor) -> None:
        """Keep further values: what a receiver could not hold of those it was lent."""
        self._kept.add_(values)

    def scale(self, factor: float) -> None:
        """Multiply `kept`, for gradients that count more or less from now on."""
        self._kept.mul_(float(np.float32(factor)))
        if self._sure is not None:
            self._sure.mul_(float(np.float32(factor)))
