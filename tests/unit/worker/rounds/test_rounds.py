"""Rounds over real sockets equal a plain loop that sums the same parts in the same order."""

import contextlib
import hashlib
import random
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import nn

from shoestring.codec.feedback import Feedback
from shoestring.codec.registry import make
from shoestring.model.parts import cut
from shoestring.server import rules
from shoestring.worker.optimizers import hyper_of, rule_of
from shoestring.worker.session import Session
from shoestring.worker.wrap import join
from tests.unit.worker.cluster import Cluster

STEPS = 200
ROWS = 8


_seeding = threading.Lock()  # workers are threads here, and torch has one seed for all


def make_model(seed: int = 3) -> tuple[nn.Module, torch.optim.Optimizer]:
    with _seeding:
        torch.manual_seed(seed)
        model = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(8 * 64, 160),
            nn.ReLU(),
            nn.Linear(160, 10),
        )
    return model, torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=1e-4)


def batch(step: int, worker: int) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(1000 * step + worker)
    return torch.randn(ROWS, 1, 8, 8, generator=source), torch.randint(0, 10, (ROWS,), generator=source)


def loss_of(model: nn.Module, step: int, worker: int) -> torch.Tensor:
    x, y = batch(step, worker)
    return nn.functional.cross_entropy(model(x), y)


def reference(workers: int, codec: str, steps: int = STEPS) -> str:
    """The same run in one loop: no shards, no messages, one model."""
    model, optimizer = make_model()
    parameters = list(model.parameters())
    flat = np.concatenate([p.detach().numpy().ravel() for p in parameters])
    rule = rule_of(optimizer)
    state = {name: np.zeros_like(flat) for name in rule.state_names}
    parts = cut([tuple(p.shape) for p in parameters])
    ends = np.cumsum([0] + [part.size for part in parts])
    coder = make(codec)
    up = [[Feedback(coder, part.layout) for part in parts] for _ in range(workers)]
    down = [Feedback(coder, part.layout) for part in parts]
    for step in range(1, steps + 1):
        gradients = []
        for worker in range(workers):
            model.zero_grad()
            loss_of(model, step, worker).backward()
            gradients.append(np.concatenate([p.grad.numpy().ravel() for p in parameters]))
        for part, low, high in zip(parts, ends, ends[1:], strict=False):
            total = np.zeros(part.size, np.float32)
            for worker in range(workers):
                sent = np.empty(part.size, np.float32)
                coder.decode(up[worker][part.index].encode(gradients[worker][low:high]), part.layout, sent)
                total = total + sent if worker else sent
            own = {name: vector[low:high] for name, vector in state.items()}
            hyper = hyper_of(rule, optimizer.param_groups)[0]
            params = flat[low:high]
            rules.update(rule, hyper, params, total, own, step, float(np.float32(1.0 / workers)))
            if codec == "float32":
                params += total
            else:
                change = np.empty(part.size, np.float32)
                coder.decode(down[part.index].encode(total), part.layout, change)
                params += change
        place = 0
        with torch.no_grad():
            for parameter in parameters:
                values = flat[place : place + parameter.numel()]
                parameter.copy_(torch.from_numpy(values).view_as(parameter))
                place += parameter.numel()
    return hashlib.sha256(flat.data).hexdigest()


@pytest.fixture(scope="module", autouse=True)
def one_torch_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Turnstile:
    """Makes workers take each step's backward pass one after the other, in an order drawn anew.

    So each is late in some rounds, behind all the others: a delay that needs no clock.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._passed: dict[int, int] = {}
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def turn(self, step: int, worker: int) -> Iterator[None]:
        order = random.Random(step).sample(range(self._workers), self._workers)
        with self._changed:
            is_next = self._changed.wait_for(lambda: self._passed.get(step, 0) == order.index(worker), 60)
        assert is_next, "another worker did not come"
        yield
        with self._changed:
            self._passed[step] = order.index(worker) + 1
            self._changed.notify_all()


def run(workers: int, shards: int, codec: str, *, in_turn: bool, ipc: bool) -> list[list[str]]:
    """Train and return each worker's hash after every tenth round."""
    turnstile = Turnstile(workers)

    def be_worker(here: Session) -> list[str]:
        # Only the first worker's parameters count.
        model, optimizer = make_model(seed=3 if here.run.worker == 0 else 100 + here.run.worker)
        model, optimizer = join(here, model, optimizer, codec=codec, policy="every", clip_norm=0.0)
        hashes = []
        for step in range(1, STEPS + 1):
            with turnstile.turn(step, here.run.worker) if in_turn else contextlib.nullcontext():
                loss_of(model, step, here.run.worker).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 10 == 0:
                hashes.append(optimizer.parameter_hash())
        return hashes

    with Cluster(workers, shards, ipc=ipc) as cluster:
        return cluster.train(be_worker)


@pytest.mark.parametrize(
    ("workers", "codec"), [(1, "float32"), (1, "dct"), (2, "float32"), (2, "dct"), (3, "dct")]
)
def test_every_step_equals_the_reference_on_any_number_of_shards(workers: int, codec: str) -> None:
    want = reference(workers, codec)
    for shards, in_turn, ipc in ((1, False, False), (2, True, True), (3, False, False)):
        hashes = run(workers, shards, codec, in_turn=in_turn, ipc=ipc)
        assert all(own == hashes[0] for own in hashes), f"replicas differ on {shards} shards"
        assert hashes[0][-1] == want, f"{shards} shards"
