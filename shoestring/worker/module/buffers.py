"""Buffers that follow the first worker's, as those of DistributedDataParallel do.

Running statistics of BatchNorm are the usual case. What has changed of a buffer on the first worker
goes with the push of a part, and with its answer to all others. BatchNorm layers that share their
statistics (`share_batchnorm`) have a way of their own.
"""

from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from shoestring.errors import UsageError, WireError
from shoestring.wire.messages import NEWS_LIMIT
from shoestring.worker.batchnorm.layers import SharedBatchNorm
from shoestring.worker.replica.replica import Replica

_HINT = "give `wrap(..., broadcast_buffers=False)`, or register it with the parameters that belong to it"


@dataclass
class _Buffer:
    """One buffer, which the script may replace by another tensor at any time."""

    module: nn.Module
    name: str
    label: str
    seen: tuple[int, int] = (0, 0)  # its tensor and that tensor's version when it was last told

    def tensor(self) -> Tensor | None:
        return self.module._buffers.get(self.name)

    def has_changed(self) -> bool:
        """Whether it was written to since the last call."""
        tensor = self.tensor()
        now = (0, 0) if tensor is None else (id(tensor), tensor._version)
        before, self.seen = self.seen, now
        # Normalisation writes to its statistics without a new version.
        return now != before or (self.module.training and isinstance(self.module, _NormBase))


class SharedBuffers:
    """The buffers of one model, on one worker. Used by the training thread alone."""

    def __init__(self, model: nn.Module, replica: Replica, *, is_first: bool) -> None:
        self._is_first = is_first
        self._buffers: list[_Buffer] = []
        self.of_part: dict[int, list[int]] = {}  # the numbers of the buffers that go with each
        places = {parameter: index for index, parameter in enumerate(replica.parameters)}
        last = 0
        for prefix, module in model.named_modules():
            for parameter in module.parameters(recurse=False):
                last = places.get(parameter, last)
            if isinstance(module, SharedBatchNorm):
                continue
            for name in module._buffers:
                parts = replica.parts_of_parameter[last]
                self.of_part.setdefault(parts[0] if parts else 0, []).append(len(self._buffers))
                label = f"{prefix}.{name}" if prefix else name
                self._buffers.append(_Buffer(module, name, label))
        for buffer in self._buffers:
            buffer.has_changed()

    def take(self, part: int) -> bytes:
        """What the push of a part tells of the buffers that go with it."""
        if not self._is_first:
            return b""
        changed = [index for index in self.of_part.get(part, ()) if self._buffers[index].has_changed()]
        if not changed:
            return b""
        news = msgspec.msgpack.encode([(index, _bytes(self._buffers[index].tensor())) for index in changed])
        if len(news) > NEWS_LIMIT:
            raise UsageError(
                f"buffers of {len(news)} bytes changed with `{self._buffers[changed[0]].label}`, "
                f"the most for one part is {NEWS_LIMIT}",
                hint=_HINT,
            )
        return news

    def hear(self, part: int, news: bytes) -> None:
        """Set the buffers of a part as the first worker told."""
        try:
            told = msgspec.msgpack.decode(news, type=list[tuple[int, bytes]])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise WireError(f"news of buffers cannot be read: {error}", hint="check versions") from None
        for index, data in told:
            if index not in self.of_part.get(part, ()):
                raise WireError(f"news of a buffer that part {part} has not", hint="check versions")
            fill(self._buffers[index].tensor(), data, self._buffers[index].label)


def _bytes(tensor: Tensor | None) -> bytes:
    return b"" if tensor is None else words(tensor).numpy().tobytes()


def words(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, in the order of its shape, on the host."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def fill(tensor: Tensor | None, data: bytes | memoryview, label: str) -> None:
    """Set a tensor from the bytes of another like it."""
    size = 0 if tensor is None else tensor.numel() * tensor.element_size()
    if len(data) != size:
        raise UsageError(
            f"`{label}` has {size} bytes here, and {len(data)} on the first worker",
            hint="build the same model, with buffers of the same shapes, on every worker",
        )
    if tensor is None or not size:
        return
    values = torch.frombuffer(bytearray(data), dtype=tensor.dtype).view(tensor.shape)
    with torch.no_grad():
        tensor.copy_(values)
