"""A shard to talk to without sockets, and messages that fit it."""

import msgspec
import numpy as np

from shoestring.codec.registry import make
from shoestring.model.parts import cut
from shoestring.model.rules import Rule
from shoestring.model.table import Table, Tensor
from shoestring.server.shard import Shard
from shoestring.wire import messages as say
from shoestring.wire.messages import Message

EMPTY = memoryview(b"")
SHAPES = ((30_000,), (200, 160), (5,))  # two parts
SGD = Rule("sgd", momentum=True)
HYPER = [[0.5, 0.5, 0.0, 0.0]]


def table(clip_norm: float = 0.0, rule: Rule = SGD, shapes=SHAPES, dtype: str = "float32") -> Table:
    tensors = tuple(Tensor(f"t{i}", shape, 0, dtype) for i, shape in enumerate(shapes))
    return Table(tensors, rule, 1, clip_norm)


PARTS = cut(SHAPES)


def gradient(part: int, worker: int, seq: int) -> np.ndarray:
    rng = np.random.default_rng((part, worker, seq))
    return rng.standard_normal(PARTS[part].size).astype(np.float32)


def push_of(part: int, worker: int, seq: int, *, codec: str = "float32", life: int = 1, **changed):
    """A push and its payload."""
    values = gradient(part, worker, seq)
    payload = values.view(np.uint8) if codec == "float32" else make(codec).encode(values, PARTS[part].layout)
    fields = {
        "part": part,
        "worker": worker,
        "sender": worker,
        "incarnation": life,
        "seq": seq,
        "have": seq - 1,
        "weight": 1.0,
        "codec": codec,
        "reply": codec,
        "reply_cost": 1.0,
        "hyper": HYPER,
        "used": b"",
    }
    return say.Push(**(fields | changed)), EMPTY if changed.get("skip") else payload.data


def hello_of(worker: int, workers: int, life: int = 1, **changed) -> say.Hello:
    """The hello of one process; a launcher has counted it."""
    fields = {
        "protocol": say.PROTOCOL,
        "run": "run",
        "worker": worker,
        "workers": workers,
        "life": str(life),
        "incarnation": life,
        "shard": 0,
        "shards": 1,
    }
    return say.Hello(**(fields | changed))


class Talk:
    """One shard of one, and its workers."""

    def __init__(self, workers: int = 2, model: Table | None = None, **settings) -> None:
        self.shard = Shard(0, 1, "run", **settings)
        self.workers = workers
        self.packed = memoryview(msgspec.msgpack.encode(model or table()))
        self.now = 0.0

    def tell(self, worker: int, message: Message, payload: memoryview = EMPTY, life: int = 1) -> list:
        """Say something and return all that the shard says then, as (worker.life, message)."""
        self.shard.handle(b"%d.%d" % (worker, life), message, payload, self.now)
        return self.heard()

    def heard(self) -> list:
        said = [(identity.decode(), message) for identity, message, _ in self.shard.outbox]
        self.payloads = [bytes(payload) for _, _, payload in self.shard.outbox]
        self.shard.outbox.clear()
        return said

    def hello(self, worker: int, life: int = 1, /, **changed) -> list:
        return self.tell(
            worker,
            hello_of(**({"worker": worker, "workers": self.workers, "life": life} | changed)),
            self.packed,
            life,
        )

    def enter(self, worker: int, first: int = 1, life: int = 1) -> list:
        self.hello(worker, life)
        return self.tell(worker, say.Enter(first), life=life)

    def begin(self) -> "Talk":
        """Let all workers enter, and the first give parameters."""
        for worker in range(self.workers):
            self.enter(worker)
        for part in PARTS:
            self.tell(0, say.Init(part.index), np.zeros(part.size, np.float32).view(np.uint8).data)
        return self

    def push(self, part: int, worker: int, seq: int, **changed) -> list:
        message, payload = push_of(part, worker, seq, **changed)
        return self.tell(worker, message, payload, changed.get("life", 1))

    def work(self) -> list:
        """Do all there is to do; return what the shard says then."""
        while (work := self.shard.next_work()) is not None:
            work.run()
            self.shard.finish(work)
        return self.heard()

    def round(self, seq: int, **changed) -> list:
        """A whole round of all parts and workers."""
        said = []
        for part in PARTS:
            for worker in range(self.workers):
                said += self.push(part.index, worker, seq, **changed)
        return said + self.work()

    def params(self) -> list[bytes]:
        return [rounds.holding.params.tobytes() for rounds in self.shard.parts.values()]


def kinds(said) -> list[str]:
    return [f"{who} {type(message).__name__}" for who, message in said]


def refusal(said) -> say.Refusal:
    [(_, message)] = said
    assert isinstance(message, say.Refusal)
    return message


RECORD = b'{"name":"worker-%d.safetensors","size":1,"header":"%s","tensors":[],"facts":{}}'


def record(worker: int) -> memoryview:
    return memoryview(RECORD % (worker, b"0" * 64))
