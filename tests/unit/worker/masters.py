"""Training with float32 masters written out: one loop, no shards, no messages, and torch's own rounding."""

import functools
import gc
import hashlib
import itertools
import threading
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import nn

from shoestring.codec.base import Vector
from shoestring.codec.feedback import Feedback
from shoestring.codec.registry import LOSSLESS, make
from shoestring.model.parts import Part, cut
from shoestring.model.rules import Rule
from shoestring.server import rules
from shoestring.worker.optimizers import hyper_of, rule_of

Dtypes = tuple[torch.dtype, ...]

WORKERS, STEPS = 2, 12
MIXTURES: dict[str, Dtypes] = {
    "bfloat16": (torch.bfloat16,),
    "float16": (torch.float16,),
    "mixed": (torch.bfloat16, torch.float32, torch.float16),
}
_seeding = threading.Lock()  # workers are threads here, and torch has one seed for all


class Net(nn.Module):
    """Linear layers that take turns in their dtype, so that some part has several."""

    def __init__(self, dtypes: Dtypes) -> None:
        super().__init__()
        sides = (24, 300, 200, 6)
        self.layers = nn.ModuleList(
            nn.Linear(inner, outer, dtype=dtypes[index % len(dtypes)])
            for index, (inner, outer) in enumerate(itertools.pairwise(sides))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:-1]:
            x = torch.tanh(layer(x.to(layer.weight.dtype)))
        return self.layers[-1](x.to(self.layers[-1].weight.dtype)).float()


def build(dtypes: Dtypes) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer, which in half precision can do nothing with a smaller `eps`."""
    with _seeding:
        torch.manual_seed(4)
        net = Net(dtypes)
    return net, torch.optim.AdamW(net.parameters(), 0.01, eps=1e-3, weight_decay=0.1)


def loss_of(model: nn.Module, step: int, worker: int) -> torch.Tensor:
    source = torch.Generator().manual_seed(1000 * step + worker)
    x, y = torch.randn(8, 24, generator=source), torch.randint(0, 6, (8,), generator=source)
    return nn.functional.cross_entropy(model(x), y)


def live_tensors() -> dict[int, torch.UntypedStorage]:
    """The memory of every tensor, by its address; who holds this sees no address used again."""
    gc.collect()
    found: dict[int, torch.UntypedStorage] = {}
    for item in gc.get_objects():
        if type(item) in (torch.Tensor, nn.Parameter):
            gradient = item.grad if item.is_leaf else None
            for tensor in (item, gradient):
                if tensor is not None and tensor.layout == torch.strided:
                    found[tensor.data_ptr()] = tensor.untyped_storage()
    return {storage.data_ptr(): storage for storage in found.values()}


def new_bytes(before: dict[int, torch.UntypedStorage]) -> int:
    """What tensors take that have been made since."""
    return sum(storage.nbytes() for address, storage in live_tensors().items() if address not in before)


class Plain:
    """The workers' models, as one vector of all parameters each."""

    def __init__(self, dtypes: Dtypes) -> None:
        pairs = [build(dtypes) for _ in range(WORKERS)]
        self.models = [list(model.parameters()) for model, _ in pairs]
        self.nets = [model for model, _ in pairs]
        self.optimizers = [optimizer for _, optimizer in pairs]
        self.parts = cut([tuple(parameter.shape) for parameter in self.models[0]])
        self.places = np.cumsum([0] + [parameter.numel() for parameter in self.models[0]])
        self.ends = np.cumsum([0] + [part.size for part in self.parts])
        self.up = [[Feedback(make(LOSSLESS), part.layout) for part in self.parts] for _ in range(WORKERS)]

    def of_parts(self, vector: Vector) -> Iterator[tuple[Part, Vector]]:
        for part, low, high in zip(self.parts, self.ends, self.ends[1:], strict=False):
            yield part, vector[low:high]

    def values(self, worker: int) -> Vector:
        return _flat(self.models[worker])

    def gradient(self, worker: int, step: int) -> Vector:
        for parameter in self.models[worker]:
            parameter.grad = None
        loss_of(self.nets[worker], step, worker).backward()
        return _flat([parameter.grad for parameter in self.models[worker]])

    def give(self, worker: int, vector: Vector) -> None:
        with torch.no_grad():
            for parameter, own in self._pieces(worker, vector):
                parameter.copy_(own.view(parameter.shape))

    def rounded(self, vector: Vector) -> Vector:
        return _flat([own.to(parameter.dtype) for parameter, own in self._pieces(0, vector)])

    def _pieces(self, worker: int, vector: Vector) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for parameter, low, high in zip(self.models[worker], self.places, self.places[1:], strict=False):
            yield parameter, torch.from_numpy(vector[low:high].copy())

    def total(self, given: Sequence[Vector], codec: str) -> Vector:
        """The sum of what workers send, in their order; what is not sent is kept."""
        total: Vector = np.zeros(self.ends[-1], np.float32)
        for worker, vector in enumerate(given):
            sent = np.concatenate(
                [_code(self.up[worker][part.index], own, codec) for part, own in self.of_parts(vector)]
            )
            total = total + sent if worker else sent
        return total

    def digest(self) -> str:
        digest = hashlib.sha256()
        for parameter in self.models[0]:
            digest.update(parameter.detach().reshape(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()


@functools.cache
def every_step(dtypes: Dtypes, codec: str, delay: int = 0, warmup: int = 0) -> list[str]:
    """AdamW updates the master with the mean gradient; workers hold it rounded, or near to that.

    What they hold after each step, which with a delay is that of the step before.
    """
    plain = Plain(dtypes)
    master = plain.values(0)
    held = [master.copy()]
    rule = rule_of(plain.optimizers[0])
    hyper = hyper_of(rule, plain.optimizers[0].param_groups)[0]
    state = {name: np.zeros_like(master) for name in rule.state_names}
    digests = []
    for step in range(1, STEPS + 1):
        own = LOSSLESS if step <= warmup else codec
        gradients = [plain.gradient(worker, step) for worker in range(WORKERS)]
        rules.apply(rule, hyper, master, plain.total(gradients, own), state, step, 0.5)
        near = plain.rounded(master)
        if own != LOSSLESS:
            lacked = near - held[-1]
            near = held[-1].copy()
            for (part, values), (_, change) in zip(plain.of_parts(near), plain.of_parts(lacked), strict=True):
                coder = make(own)
                coder.decode(coder.encode(change, part.layout), part.layout, values, 1.0)
            near = plain.rounded(near)
        held.append(near)
        for worker in range(WORKERS):
            plain.give(worker, held[step - delay])
        digests.append(plain.digest())
    return digests


@functools.cache
def local_steps(dtypes: Dtypes, codec: str, h: int) -> list[str]:
    """Each worker's own AdamW, and a float32 anchor that moves by the mean of what parameters moved.

    What workers hold after each round.
    """
    plain = Plain(dtypes)
    anchor = plain.values(0)
    down = [Feedback(make(codec), part.layout) for part in plain.parts]
    digests = []
    for step in range(1, STEPS + 1):
        for worker in range(WORKERS):
            plain.gradient(worker, step)
            plain.optimizers[worker].step()
        if step % h:
            continue
        start = plain.rounded(anchor)
        moved = plain.total([plain.values(worker) - start for worker in range(WORKERS)], codec)
        rules.update(Rule("average"), [], anchor, moved, {}, 1, 0.5)
        anchor += np.concatenate([_code(down[part.index], own, codec) for part, own in plain.of_parts(moved)])
        for worker in range(WORKERS):
            plain.give(worker, anchor)
        digests.append(plain.digest())
        for worker in range(WORKERS):  # then each goes on with what it has not sent yet
            vector = plain.values(worker)
            for part, own in plain.of_parts(vector):
                plain.up[worker][part.index].lend(own)
            plain.give(worker, vector)
            for part, own in plain.of_parts(vector - plain.values(worker)):
                plain.up[worker][part.index].add(own)
    return digests


def _flat(tensors: Sequence[torch.Tensor | None]) -> Vector:
    flat: Vector = torch.cat([t.detach().float().reshape(-1) for t in tensors if t is not None]).numpy()
    return flat


def _code(feedback: Feedback, values: Vector, codec: str) -> Vector:
    """What arrives of values; the rest stays in the feedback."""
    if codec == LOSSLESS:
        sent = values + feedback.kept
        feedback.reset()
        return sent
    feedback.codec = make(codec)
    sent = np.empty_like(values)
    feedback.codec.decode(feedback.encode(values), feedback.layout, sent)
    return sent
