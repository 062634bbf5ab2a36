"""Keep what a payload left out on the GPU where the gradient lies: `Feedback` for tensors there.

Promises what `codec/feedback.py` promises, with the same arithmetic: for one stream both
keep the same bits. Only the packed bytes reach the host.
"""

import numpy as np
import torch
from torch import Tensor

from shoestring.codec.base import Layout, Payload, Vector
from shoestring.codec.dct.gpu.codec import GpuDct


class GpuFeedback:
    """Encodes one bucket's gradients, step after step, losing nothing.

    Holds as much memory on the device as the bucket. Not thread-safe; a call on another stream
    than the one before must wait for that. `encode_total` returns when its stream is done.
    """

    def __init__(self, layout: Layout, device: torch.device, kept: Vector | None = None) -> None:
        self.layout = layout
        self.device = device
        self._kept = torch.zeros(layout.total, device=device)
        if kept is not None:
            self._kept.copy_(torch.from_numpy(kept + np.float32(0)))

    @property
    def kept(self) -> Vector:
        """What has not been sent yet: a copy on the host."""
        copy: Vector = self._kept.cpu().numpy().copy()
        return copy

    @property
    def waiting(self) -> Tensor:
        """What has not been sent yet, without a copy: to be added to the next gradient, not changed."""
        return self._kept

    def encode_total(self, codec: GpuDct, came_in: Tensor) -> Payload:
        """Turn a vector to which what was kept has been added into bytes; keep what they leave out."""
        kept = torch.empty_like(came_in)
        payload: Payload = codec.encode(came_in, self.layout, kept).numpy()
        self._kept = kept  # only now: a vector that is refused changes nothing
        return payload

    def lend(self, values: Tensor) -> None:
        """Add what was kept to a vector; what rounding leaves out of it stays kept."""
        own = values.clone()
        values.add_(self._kept)
        added = values - own
        self._kept = (own - (values - added)) + (self._kept - added)  # exact: Knuth's sum of two

    def scale(self, factor: float) -> None:
        """Multiply what was kept, for gradients that count more or less from now on."""
        self._kept.mul_(float(np.float32(factor)))
