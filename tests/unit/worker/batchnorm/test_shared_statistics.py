"""Shared BatchNorm over real sockets: workers normalise together, and agree on what they have seen."""

import threading
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shoestring.checkpoint.snapshot import newest
from shoestring.model import parts
from shoestring.wire import frames
from shoestring.worker.batchnorm.layers import share_batchnorm, shared_layers
from shoestring.worker.rounds.policy import Async, Bounded, EveryStep, LocalSteps
from shoestring.worker.session import Session
from shoestring.worker.wrap import join
from tests.unit.worker.cluster import Cluster
from tests.unit.worker.listener import Listener, histories

_seeding = threading.Lock()  # workers are threads here, and torch has one seed for all


@pytest.fixture(scope="module", autouse=True)
def one_torch_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch):
    """Let layers travel with different parts, on different shards."""
    monkeypatch.setattr(parts, "SMALLEST", 64)


def net(**settings) -> nn.Module:
    with _seeding:
        torch.manual_seed(5)
        return nn.Sequential(
            nn.Conv2d(1, 6, 3, bias=False),
            nn.BatchNorm2d(6, **settings),
            nn.ReLU(),
            nn.Conv2d(6, 5, 3),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(20, 8),
            nn.BatchNorm1d(8, **settings),
            nn.Linear(8, 3),
        )


def batch(*key: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(sum(1000**place * k for place, k in enumerate(key)))
    return torch.randn(rows, 1, 6, 6, generator=source), torch.randint(0, 3, (rows,), generator=source)


def buffers(model: nn.Module) -> list[list[float]]:
    return [buffer.tolist() for buffer in model.buffers()]


SIZES = (5, 2, 1)
LOSS = nn.CrossEntropyLoss()


def joined() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """One large batch through plain layers: outputs of each worker, and the mean gradient."""
    model = net()
    data = [batch(0, worker, rows=rows) for worker, rows in enumerate(SIZES)]
    outputs = model(torch.cat([x for x, _ in data])).split(SIZES)
    losses = [LOSS(own, y) for own, (_, y) in zip(outputs, data, strict=True)]
    return list(outputs), list(torch.autograd.grad(sum(losses) / len(SIZES), list(model.parameters())))


def test_workers_normalise_as_one_large_batch() -> None:
    """The same batch again and again and nothing learnt: what the others sent last is what they see now."""
    steps = 104  # 100 to warm up, then some for the layers to settle one after the other

    def be_worker(here: Session):
        model = share_batchnorm(net(), horizon=1)
        optimizer = torch.optim.SGD(model.parameters(), 0.0)
        model, optimizer = join(here, model, optimizer, codec="float32", policy="every")
        x, y = batch(0, here.run.worker, rows=SIZES[here.run.worker])
        for _ in range(steps):
            optimizer.zero_grad()
            output = model(x)
            LOSS(output, y).backward()
            gradients = [p.grad.clone() for p in model.parameters()]
            optimizer.step()
        return output.detach(), gradients, buffers(model)

    with Cluster(3, 2) as cluster:
        listener = Listener(cluster)
        results = cluster.train(be_worker)
    listener.check()
    outputs, gradients = joined()
    eps = torch.finfo(torch.float32).eps
    for (own, _, _), want in zip(results, outputs, strict=True):
        # Two layers of sums in another order, each a few dozen roundings of what is at most some units large.
        assert (own - want).abs().max() <= 512 * eps * want.abs().max()
    for index, want in enumerate(gradients):
        got = torch.stack([own[index] for _, own, _ in results]).mean(0)
        # The others' slopes come with 7 bits and a sign.
        assert (got - want).abs().max() <= 2**-6 * max(g.abs().max() for g in gradients)
    assert all(own == results[0][2] for _, _, own in results)


def test_alone_each_worker_would_compute_something_else() -> None:
    """So the test above shows that they are not."""
    outputs, _ = joined()
    x, _ = batch(0, 0, rows=SIZES[0])
    assert (net()(x) - outputs[0]).abs().max() > 0.1


POLICIES = [
    EveryStep(),
    EveryStep(delay=1),
    LocalSteps(4),
    LocalSteps(3, outer="nesterov", warmup=4),
    Bounded(2),
    Bounded(0, warmup=3),
    Async(),
]


@pytest.mark.parametrize(
    ("policy", "codec"),
    [*((policy, "dct") for policy in POLICIES), (EveryStep(), "float32"), (Async(), "float32")],
    ids=str,
)
def test_every_policy_shares_and_learns(policy, codec: str) -> None:
    steps = 30

    def be_worker(here: Session):
        model = share_batchnorm(net())
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        model, optimizer = join(here, model, optimizer, codec=codec, policy=policy)
        losses, states = [], {}
        for step in range(steps):
            # An epoch ends with a short batch, on one worker of one.
            x, y = batch(step % 6, here.run.worker, rows=6 if step % 6 < 5 else 1 + here.run.worker)
            x[:, 0, :, 0] += 4.0 * (y[:, None] - 1)  # something to learn
            loss = LOSS(model(x), y)
            loss.backward()
            rounds = optimizer.driver.rounds
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if optimizer.driver.rounds > rounds:
                states[optimizer.driver.rounds] = (optimizer.parameter_hash(), buffers(model))
        known = [layer.record.others for _, layer in shared_layers(model)]
        return losses, states, known

    with Cluster(3, 2) as cluster:
        listener = Listener(cluster)
        results = cluster.train(be_worker)
    assert len(listener.histories()) == 2
    if isinstance(policy, EveryStep | LocalSteps):
        listener.check()
    for losses, states, known in results:
        assert sum(losses[-6:-1]) < 0.8 * sum(losses[:5])
        assert all(others is not None and others.count > 0 for others in known)
        assert all(others.is_local == isinstance(policy, LocalSteps) for others in known)
        if isinstance(policy, EveryStep | LocalSteps):
            assert states == results[0][1], "replicas differ"


class Crooked(nn.Module):
    """Layers of every sort: twice in a pass, in some steps only, frozen, without parameters, checkpointed."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.BatchNorm2d(1).requires_grad_(False)
        self.conv = nn.Conv2d(1, 4, 3)
        self.twice = nn.BatchNorm2d(4)
        self.sometimes = nn.BatchNorm2d(4, affine=False, track_running_stats=False)
        self.partly = nn.BatchNorm2d(4)
        self.partly.weight.requires_grad_(False)
        self.again = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU())
        self.never = nn.BatchNorm1d(7)
        self.last = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, use: bool) -> torch.Tensor:
        x = self.twice(self.twice(self.conv(self.start(x))).relu())
        if use:
            x = self.sometimes(x)
        x = checkpoint(self.again, self.partly(x), use_reentrant=False)
        return self.last(x.mean((2, 3)))


def test_layers_of_every_sort_count_what_they_saw() -> None:
    steps = 9

    def be_worker(here: Session):
        worker = here.run.worker
        with _seeding:
            torch.manual_seed(2)
            model = share_batchnorm(Crooked())
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.05)
        model, optimizer = join(here, model, optimizer, codec="dct", policy="every")
        states = []
        for step in range(steps):
            for part in range(2):  # two micro-batches
                x, y = batch(step, worker, part, rows=3 + worker)
                with torch.autocast("cpu", torch.bfloat16, enabled=step % 2 == 0):
                    loss = LOSS(model(x, use=(step + worker) % 2 == 0).float(), y)
                if part == 0:
                    with model.no_sync():
                        loss.backward()
                else:
                    loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            states.append((optimizer.parameter_hash(), [b for b in buffers(model) if isinstance(b, list)]))
        return states

    with Cluster(2, 2) as cluster:
        listener = Listener(cluster)
        first, second = cluster.train(be_worker)
    listener.check()
    counts: dict[str, list[list[float]]] = {}
    for part, history in listener.histories().items():
        for index, layer in enumerate(history.layers):
            batches = [listener.seen(part, seq) for seq in range(1, steps + 1)]
            counts[layer.name] = [[own.count[index] for own in those] for those in batches]
    assert first == second
    values = [2 * rows * 16 for rows in (3, 4)]  # micro-batches, rows, 4 x 4 places
    for name in ("partly", "again.1"):
        assert counts[name] == [values] * steps
    assert counts["start"] == [[2 * rows * 36 for rows in (3, 4)]] * steps
    assert counts["twice"] == [[2 * n for n in values]] * steps
    assert counts["sometimes"] == [
        [n if (step + worker) % 2 == 0 else 0 for worker, n in enumerate(values)] for step in range(steps)
    ]
    assert counts["never"] == [[0, 0]] * steps


@pytest.mark.parametrize("codec", ["float32", "dct"])
def test_no_message_more_and_twelve_bytes_a_channel_at_most(codec: str) -> None:
    heard = []
    for share in (False, True):

        def be_worker(here: Session, share: bool = share) -> None:
            model = share_batchnorm(net()) if share else net()
            optimizer = torch.optim.SGD(model.parameters(), 0.05)
            model, optimizer = join(here, model, optimizer, codec=codec, policy="every")
            for step in range(5):
                x, y = batch(step, here.run.worker, rows=4)
                LOSS(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()

        with Cluster(2, 2) as cluster:
            heard.append(Listener(cluster))
            cluster.train(be_worker)
    plain, shared = heard
    assert plain.others == shared.others
    channels = {
        part: sum(layer.channels for layer in history.layers) for part, history in shared.histories().items()
    }
    assert sum(channels.values()) == 14
    for own, other in ((plain.pushes, shared.pushes), (plain.answers, shared.answers)):
        assert own.keys() == other.keys()
        for key, message in other.items():
            extra = len(frames.encode(message)[0]) - len(frames.encode(own[key])[0])
            assert bool(message.statistics) == (key[0] in channels)
            assert extra <= 12 * channels.get(key[0], 0)


def test_a_worker_that_comes_back_knows_what_the_others_know() -> None:
    """A worker ends and is started again at every tenth step."""
    lives, each = 4, 10
    here_again = [threading.Event() for _ in range(lives + 1)]
    gone = [threading.Event() for _ in range(lives + 1)]
    states: dict[int, list] = {}

    def step(model: nn.Module, optimizer, worker: int) -> tuple:
        x, y = batch(optimizer.driver.rounds, worker, rows=3)
        LOSS(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        states.setdefault(optimizer.driver.rounds, []).append((optimizer.parameter_hash(), running(model)))
        return states[optimizer.driver.rounds][-1]

    def running(model: nn.Module) -> list[list[float]]:
        return [own for own in buffers(model) if isinstance(own, list)]

    def enter(here: Session):
        model = share_batchnorm(net())
        return join(here, model, torch.optim.SGD(model.parameters(), 0.05), codec="dct", policy="every")

    def stay(cluster: Cluster) -> None:
        with cluster.session(0) as here:
            model, optimizer = enter(here)
            for life in range(1, lives + 1):
                assert here_again[life].wait(60)
                for _ in range(each):
                    last = step(model, optimizer, 0)
                assert gone[life].wait(60)
                states[-life] = [last]

    errors: list[BaseException] = []

    def guarded(cluster: Cluster) -> None:
        try:
            stay(cluster)
        except BaseException as error:
            errors.append(error)

    with Cluster(2, 2) as cluster:
        listener = Listener(cluster)
        thread = threading.Thread(target=guarded, args=(cluster,))
        thread.start()
        for life in range(1, lives + 1):
            with cluster.session(1, incarnation=life) as here:
                model, optimizer = enter(here)
                known = [layer.record.others for _, layer in shared_layers(model)]
                if life == 1:
                    assert known == [None, None]
                else:
                    assert all(others.count > 0 for others in known)
                    assert (optimizer.parameter_hash(), running(model)) == states[(life - 1) * each][0]
                here_again[life].set()
                for _ in range(each):
                    step(model, optimizer, 1)
            gone[life].set()
        thread.join(60)
        assert errors == []
        assert not thread.is_alive()
    listener.check()
    for seq in range(1, lives * each + 1):
        assert states[seq][0] == states[seq][1], f"replicas differ after round {seq}"


class StoppedError(Exception):
    """The end of a run that did not reach its end."""


@pytest.mark.parametrize("policy", ["every", "every:delay=1", "local:3"])
@pytest.mark.parametrize("shards", [2, 3])
def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path, policy: str, shards: int) -> None:
    """It goes on on more shards, from the checkpoint at step 14, or after 4 rounds of local steps."""
    steps, every = 20, 4 if policy == "local:3" else 7

    def be_worker(here: Session, stop_after: int | None = None):
        model = share_batchnorm(net())
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        model, optimizer = join(here, model, optimizer, codec="dct", policy=policy)
        optimizer.driver.weight = 4.0 + here.run.worker
        while optimizer.steps < steps:
            x, y = batch(optimizer.steps, here.run.worker, rows=4 + here.run.worker)
            LOSS(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            if optimizer.steps == stop_after:
                raise StoppedError
        return optimizer.parameter_hash(), buffers(model)

    with Cluster(2, 1, checkpoint=tmp_path / "whole", every=every) as whole:
        want = whole.train(be_worker)
    with Cluster(2, 1, checkpoint=tmp_path / "cut", every=every) as cut, pytest.raises(StoppedError):
        cut.train(lambda here: be_worker(here, stop_after=18))
    found, _ = newest(tmp_path / "cut")
    assert found is not None
    assert found.manifest.step == 2 * every if every == 7 else every
    with Cluster(2, shards, checkpoint=tmp_path / "cut", every=every, resume=found.folder) as resumed:
        assert resumed.train(be_worker) == want
    sums = [{part: one.sums.tolist() for part, one in histories(c).items()} for c in (whole, resumed)]
    assert len(sums[0]) == 2
    if policy != "every:delay=1":  # where the last round ends after the workers, or does not
        assert sums[0] == sums[1]
