"""Let all workers start from the first one's buffers and frozen parameters.

Workers first compare checksums, so that a large base that is the same everywhere (as a rule it is)
does not travel. What differs on any of them comes from the first worker, bit for bit, whatever its type.
"""

from collections.abc import Sequence
from functools import partial
from itertools import accumulate

import google_crc32c
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from shoestring.codec.registry import LOSSLESS
from shoestring.model import table
from shoestring.model.parts import cut
from shoestring.model.rules import Rule
from shoestring.wire import messages as say
from shoestring.wire.identity import beside
from shoestring.worker.entry import enter
from shoestring.worker.module.buffers import fill, words
from shoestring.worker.protocol.worker import Answer
from shoestring.worker.session import Session

Words = NDArray[np.uint32]


def untaken(model: nn.Module, taken: Sequence[nn.Parameter]) -> dict[str, Tensor]:
    """Buffers and the parameters but those taken, by name; without those that have no bytes of their own."""
    known = set(taken)
    frozen = {name: value for name, value in model.named_parameters() if value not in known}
    return {
        name: tensor
        for name, tensor in (frozen | dict(model.named_buffers())).items()
        if tensor.device.type != "meta" and tensor.layout == torch.strided and tensor.numel()
    }


def align(here: Session, model: int, tensors: dict[str, Tensor]) -> list[str]:
    """Bring tensors to the first worker's bits; returns the names of those that differed anywhere."""
    if here.run.workers == 1 or not tensors:
        return []
    labels = [f"{name} {tensor.dtype} {tuple(tensor.shape)}" for name, tensor in tensors.items()]
    sums = np.array([google_crc32c.value(words(tensor).numpy().tobytes()) for tensor in tensors.values()])
    own = sums.astype(np.uint32)
    with_first = _Gathering(here, beside(model, 0), labels, own, [1] * len(own))
    is_wanted = with_first.any(with_first.words != own)
    with_first.close()
    wanted = [name for name, is_it in zip(tensors, is_wanted, strict=True) if is_it]
    if wanted:
        packed = [_packed(tensors[name]) for name in wanted]
        sizes = [one.size for one in packed]
        content = _Gathering(here, beside(model, 1), wanted, np.concatenate(packed), sizes)
        for name, one in zip(wanted, np.split(content.words, np.cumsum(sizes)[:-1]), strict=True):
            tensor = tensors[name]
            fill(tensor, one.tobytes()[: tensor.numel() * tensor.element_size()], name)
        content.close()
    return wanted


def _packed(tensor: Tensor) -> Words:
    """A tensor's bytes as whole words."""
    data = words(tensor).numpy()
    return np.concatenate([data, np.zeros(-data.size % 4, np.uint8)]).view(np.uint32)


class _Gathering:
    """Vectors of 32-bit words, laid end to end, of which all workers get the first one's."""

    def __init__(
        self, here: Session, model: int, names: Sequence[str], own: Words, sizes: Sequence[int]
    ) -> None:
        shapes = [(size,) for size in sizes]
        self._parts = cut(shapes)
        self._starts = [0, *accumulate(part.size for part in self._parts)]
        self.words = own.copy()
        rows = tuple(table.Tensor(name, shape, 0) for name, shape in zip(names, shapes, strict=True))
        self._entry = enter(
            here,
            model,
            table.Table(rows, Rule("mean"), 1, 0.0),
            self._parts,
            initial=self._read,
            take=self._take,
        )

    def any(self, mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Where the mask is set on any worker. May be called once."""
        self.words = mask.astype(np.float32).view(np.uint32)
        exchange, seq = self._entry.exchange, self._entry.first_round
        for part in self._parts:
            exchange.submit(part.index, partial(self._push, part.index, seq))
        exchange.wait_sent()
        exchange.collect(seq, self._take)
        return self.words.view(np.float32) > 0

    def close(self) -> None:
        self._entry.exchange.close()

    def _push(self, part: int, seq: int) -> tuple[say.Push, memoryview]:
        push = say.Push(
            part=part,
            seq=seq,
            weight=1.0,
            codec=LOSSLESS,
            reply=LOSSLESS,
            reply_cost=32.0,
            hyper=[[]],
            used=b"",
        )
        return push, self._read(part)

    def _read(self, part: int) -> memoryview:
        return self.words[self._starts[part] : self._starts[part + 1]].view(np.uint8).data

    def _take(self, answer: Answer) -> None:
        part = answer.part
        self.words[self._starts[part] : self._starts[part + 1]] = np.frombuffer(answer.payload, np.uint32)
