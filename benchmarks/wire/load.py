"""What made-up workers say to one shard that holds a whole model.

No worker computes anything: pushes are encoded once and sent in every round, so that
all that is measured is the shard.
"""

from collections.abc import Iterator

import msgspec
import numpy as np

from shoestring.bench.wire import likeness, replay
from shoestring.codec.base import Payload, Vector
from shoestring.codec.registry import LOSSLESS, make
from shoestring.model.parts import Part, cut
from shoestring.model.rules import Rule
from shoestring.model.table import Table, Tensor
from shoestring.wire import messages as say
from shoestring.wire.messages import Message

RUN = "bench"
SGD = Rule("sgd", momentum=True)
ADAMW = Rule("adamw")
_HYPER = {"sgd": [replay.RATE, replay.MOMENTUM, 0.0, 0.0], "adamw": [1e-3, 0.9, 0.999, 1e-8, 0.01]}
_DISTINCT = 4  # workers whose gradients differ; more workers send the same again

Said = tuple[int, Message, memoryview]  # by which worker, what, with which payload
_EMPTY = memoryview(b"")


class Load:
    """The messages of some workers, in order."""

    def __init__(self, values: int, rule: Rule, codec: str, workers: int) -> None:
        self.values, self.rule, self.workers = values, rule, workers
        self.codec = make(codec)
        self.parts = cut(likeness.shapes(values))
        sources = [likeness.Gradients(values, worker).of(1) for worker in range(min(workers, _DISTINCT))]
        self._payloads = [
            [self._encode(part, source[own]) for source in sources] for part, own in self._places()
        ]

    @property
    def round_bytes(self) -> int:
        """The payloads of one round, of all workers."""
        return sum(len(payload) for _, _, payload in self.pushes(1))

    def entry(self) -> Iterator[Said]:
        """Say hello, enter the first round, and bring the first parameters; all but the last are answered."""
        tensors = tuple(Tensor(str(i), shape, 0) for i, shape in enumerate(likeness.shapes(self.values)))
        table = memoryview(msgspec.msgpack.encode(Table(tensors, self.rule, 1, 0.0)))
        for worker in range(self.workers):
            hello = say.Hello(
                protocol=say.PROTOCOL,
                run=RUN,
                worker=worker,
                workers=self.workers,
                life="bench",
                shard=0,
                shards=1,
            )
            yield worker, hello, table
            yield worker, say.Enter(1), _EMPTY
        params = likeness.parameters(self.values)
        for part, own in self._places():
            yield 0, say.Init(part.index), params[own].view(np.uint8).data

    def pushes(self, seq: int) -> Iterator[Said]:
        """Push one round; every push is answered once."""
        spec = self.codec.spec
        for part, payloads in zip(self.parts, self._payloads, strict=True):
            for worker in range(self.workers):
                push = say.Push(
                    part=part.index,
                    worker=worker,
                    sender=worker,
                    incarnation=1,
                    seq=seq,
                    have=seq - 1,
                    weight=1.0,
                    codec=spec,
                    reply=spec,
                    reply_cost=1.0,
                    hyper=[_HYPER[self.rule.kind]],
                    used=b"",
                )
                yield worker, push, payloads[worker % len(payloads)].data

    def _encode(self, part: Part, values: Vector) -> Payload:
        lossless = self.codec.name == LOSSLESS
        return values.view(np.uint8) if lossless else self.codec.encode(values, part.layout)

    def _places(self) -> Iterator[tuple[Part, slice]]:
        start = 0
        for part in self.parts:
            yield part, slice(start, start + part.size)
            start += part.size
