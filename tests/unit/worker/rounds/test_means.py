"""`wrap(model)`: after `backward` every `.grad` is the mean, as a plain loop takes it, bit for bit."""

import copy
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from shoestring.errors import JoinError, ShoestringError, UsageError
from shoestring.worker.session import Session
from shoestring.worker.wrap import join
from tests.unit.worker.cluster import Cluster

SEEDED = threading.Lock()  # workers are threads of one process, with one random state


class Net(nn.Module):
    """A convolution, BatchNorm, a layer that is used now and then, and one that never is."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.extra = nn.Linear(8, 8)
        self.never = nn.Linear(3, 3)
        self.head = nn.Linear(8, 40)

    def forward(self, x: Tensor, extra: bool = False) -> Tensor:
        x = self.norm(self.conv(x)).relu().mean((2, 3))
        return self.head(self.extra(x) if extra else x)


def make(seed: int) -> Net:
    with SEEDED:
        torch.manual_seed(seed)
        return Net()


def data(worker: int, step: int) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(1000 * worker + step)
    return torch.randn(4, 1, 6, 6, generator=source), torch.randint(0, 40, (4,), generator=source)


def backward(model: nn.Module, worker: int, step: int, extra: bool = False) -> None:
    x, y = data(worker, step)
    nn.functional.cross_entropy(model(x, extra), y).backward()


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def mean_of(models: list[Net]) -> dict[str, Tensor | None]:
    """The mean gradient of two models; zero counts where only one has a gradient."""
    means: dict[str, Tensor | None] = {}
    for (name, a), b in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        ones = [p.grad if p.grad is not None else torch.zeros_like(p) for p in (a, b)]
        means[name] = None if a.grad is None and b.grad is None else (ones[0] + ones[1]) / 2
    return means


def same(got: dict[str, Tensor | None], want: dict[str, Tensor | None]) -> bool:
    return got.keys() == want.keys() and all(
        (got[name] is None) == (want[name] is None)
        and (got[name] is None or torch.equal(got[name], want[name]))
        for name in got
    )


def train(be_worker: Callable[[Session, nn.Module], object], codec: str = "float32", shards: int = 2) -> list:
    """What two workers, each with a model of its own seed, return."""

    def body(here: Session) -> object:
        return be_worker(here, join(here, make(here.run.worker), codec=codec))

    with Cluster(2, shards) as cluster:
        return cluster.train(body)


def train_raw(be_worker: Callable[[Session], object]) -> list:
    with Cluster(2, 2) as cluster:
        return cluster.train(be_worker)


def plain() -> list[Net]:
    """Two models as `wrap` lets them start."""
    return [make(0), make(0)]


def test_gradients_are_the_mean_and_unused_parameters_have_none():
    def be_worker(here: Session, model: nn.Module) -> list:
        seen = []
        for step in range(3):
            backward(model, here.run.worker, step, extra=step == 1 and here.run.worker == 0)
            seen.append(gradients(model))
            model.zero_grad()
        return seen

    got = train(be_worker)
    for step in range(3):
        models = plain()
        for worker, model in enumerate(models):
            if step:  # the statistics of BatchNorm do not matter to gradients
                model.train()
            backward(model, worker, step, extra=step == 1 and worker == 0)
        want = mean_of(models)
        assert want["never.weight"] is None
        assert (want["extra.weight"] is None) == (step != 1)
        for worker in range(2):
            assert same(got[worker][step], want)


def test_all_start_as_the_first_worker_does_and_buffers_follow_it():
    def be_worker(here: Session, model: nn.Module) -> list:
        states = [copy.deepcopy(model.state_dict())]
        for step in range(2):
            backward(model, here.run.worker, step)
            states.append(copy.deepcopy(model.state_dict()))
        return states

    first, second = train(be_worker)
    alone = make(0)
    for step in range(3):
        want = alone.state_dict()
        for name in want:
            assert torch.equal(first[step][name], want[name]), name
            assert torch.equal(second[step][name], want[name]), name
        backward(alone, 0, step)


def test_frozen_parameters_of_any_type_come_from_the_first_worker():
    def be_worker(here: Session) -> list[Tensor]:
        model = make(here.run.worker)
        model.extra.requires_grad_(False).bfloat16()
        model.register_buffer("count", torch.tensor([here.run.worker + 7]))
        model = join(here, model, codec="float32")
        return [model.extra.weight.clone(), model.count.clone()]

    with Cluster(2, 2) as cluster:
        first, second = cluster.train(be_worker)
    assert torch.equal(first[0], make(0).extra.bfloat16().weight)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert first[1].item() == 7


def test_passes_under_no_sync_are_counted_when_the_next_one_is_exchanged():
    def be_worker(here: Session, model: nn.Module) -> tuple:
        with model.no_sync():
            backward(model, here.run.worker, 0)
        own = gradients(model)
        backward(model, here.run.worker, 1)
        return own, gradients(model)

    got = train(be_worker)
    models = plain()
    for worker, model in enumerate(models):
        backward(model, worker, 0)
        assert same(got[worker][0], gradients(model))
        backward(model, worker, 1)
    for worker in range(2):
        assert same(got[worker][1], mean_of(models))


@pytest.mark.parametrize("codec", ["float32", "dct"])
def test_two_exchanged_passes_add_up(codec: str):
    def be_worker(here: Session, model: nn.Module) -> list:
        backward(model, here.run.worker, 0)
        first = gradients(model)
        backward(model, here.run.worker, 1)
        return [first, gradients(model)]

    got = train(be_worker, codec)
    assert all(same(got[0][i], got[1][i]) for i in range(2))
    if codec == "float32":
        models = plain()
        for step in range(2):
            for worker, model in enumerate(models):
                backward(model, worker, step)
            for name, mean in mean_of(models).items():
                for model in models:
                    if mean is not None:
                        model.get_parameter(name).grad = mean.clone()
        assert same(got[0][1], mean_of(models))


def test_gradients_of_float64_parameters_keep_all_their_bits():
    def be_worker(here: Session) -> dict:
        model = make(here.run.worker)
        model.head.double()
        model = join(here, model, codec="float32")
        x, y = data(here.run.worker, 0)
        features = model.norm(model.conv(x)).relu().mean((2, 3)).double()
        nn.functional.cross_entropy(model.head(features), y).backward()
        return gradients(model)

    got = train_raw(be_worker)
    models = plain()
    for worker, model in enumerate(models):
        model.head.double()
        x, y = data(worker, 0)
        features = model.norm(model.conv(x)).relu().mean((2, 3)).double()
        nn.functional.cross_entropy(model.head(features), y).backward()
    want = mean_of(models)
    assert want["head.weight"].dtype == torch.float64
    assert not torch.equal(want["head.weight"], want["head.weight"].float().double())
    for worker in range(2):
        assert same(got[worker], want)


def test_what_is_not_finite_on_one_worker_is_so_on_all():
    def be_worker(here: Session, model: nn.Module) -> list:
        seen = []
        for step in range(3):
            x, y = data(here.run.worker, step)
            loss = nn.functional.cross_entropy(model(x), y)
            (loss * (float("inf") if step == 1 and here.run.worker == 1 else 1.0)).backward()
            seen.append(gradients(model))
            model.zero_grad()
        return seen

    for codec in ("float32", "dct"):
        first, second = train(be_worker, codec)
        for step in range(3):
            for name in first[step]:
                a, b = first[step][name], second[step][name]
                if a is not None:
                    assert np.array_equal(a.numpy(), b.numpy(), equal_nan=True)
                    assert a.isfinite().all() == (step != 1)


class Line(nn.Module):
    """A gradient that the test gives."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(32, 32))

    def forward(self, gradient: Tensor) -> Tensor:
        return (self.weight * gradient).sum()


def given(worker: int, step: int) -> Tensor:
    return torch.randn(32, 32, generator=torch.Generator().manual_seed(100 * worker + step))


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_that_are_thrown_away_leave_nothing_behind(set_to_none: bool):
    """Steps with discarded gradients in between send what the steps without them send."""

    def rounds(discarded: bool) -> Callable[[Session], list[Tensor]]:
        def be_worker(here: Session) -> list[Tensor]:
            model = join(here, Line(), codec="dct:step=3")
            optimizer = torch.optim.SGD(model.parameters(), 0.5)
            seen = []
            for step in range(5):
                if discarded:
                    model(1e3 * given(here.run.worker, 50 + step)).backward()
                    optimizer.zero_grad(set_to_none=set_to_none)
                model(given(here.run.worker, step)).backward()
                seen.append(model.weight.grad.clone())
                optimizer.step()
                optimizer.zero_grad(set_to_none=set_to_none)
            return seen

        return be_worker

    with Cluster(2, 1) as cluster:
        want = cluster.train(rounds(discarded=False))
    with Cluster(2, 1) as cluster:
        got = cluster.train(rounds(discarded=True))
    for worker in range(2):
        for one, other in zip(got[worker], want[0], strict=True):
            assert torch.equal(one, other)


def test_a_changing_loss_scale_changes_no_bit():
    """What is kept of scaled gradients counts as it would unscaled; a skipped overflow leaves nothing."""

    def rounds(scales: list[float]) -> Callable[[Session], list[Tensor]]:
        def be_worker(here: Session) -> list[Tensor]:
            model = join(here, Line(), codec="dct:step=3")
            optimizer = torch.optim.SGD(model.parameters(), 0.5)
            seen = []
            for step, scale in enumerate(scales):
                scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=scale != 1.0)
                scaler.scale(model(given(here.run.worker, step))).backward()
                seen.append(model.weight.grad / scale)
                optimizer.step()
                optimizer.zero_grad()
            return seen

        return be_worker

    with Cluster(1, 1) as cluster:
        (want,) = cluster.train(rounds([1.0] * 5))
    with Cluster(1, 1) as cluster:
        (got,) = cluster.train(rounds([65536.0, 32768.0, 32768.0, 0.5, 4096.0]))
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


def test_nothing_is_lost_on_the_way():
    """What was sent and what is kept, on workers and shard, is what came in."""

    def be_worker(here: Session) -> tuple[Tensor, np.ndarray]:
        model = join(here, Line(), codec="dct:step=3")
        optimizer = torch.optim.SGD(model.parameters(), 1.0)
        for step in range(6):
            model(given(here.run.worker, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.weight.detach().double(), here.reporter._coder._feedback[0].kept.astype(np.float64)

    with Cluster(2, 1) as cluster:
        (moved, kept0), (_, kept1) = cluster.train(be_worker)
        at_shard = cluster.shards[0].parts[0].holding._feedback.kept.astype(np.float64)
    came_in = sum(given(worker, step).double() for worker in range(2) for step in range(6)) / 2
    total = -moved.reshape(-1).numpy() + (kept0 + kept1) / 2 + at_shard
    # `dct` codes what came in on a grid of 2**-16 of the largest value; 6 rounds on each side.
    np.testing.assert_allclose(total, came_in.reshape(-1).numpy(), atol=1e-3)
    assert abs(kept0).max() > 0.1


def test_two_models_of_one_process_have_rounds_of_their_own():
    """A generator's step goes through the discriminator; each worker ends with the bits of a plain loop."""

    def make_two() -> tuple[nn.Module, nn.Module]:
        with SEEDED:
            torch.manual_seed(5)
            return nn.Linear(4, 6), nn.Linear(6, 1)

    def step(g: nn.Module, d: nn.Module, worker: int, number: int, own: dict) -> None:
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * number + worker))
        own["d"].zero_grad()
        d(g(x).detach()).mean().backward()
        own["d"].step()
        own["g"].zero_grad()
        d(g(x)).square().mean().backward()
        own["g"].step()

    def optimizers(g: nn.Module, d: nn.Module) -> dict:
        return {"g": torch.optim.Adam(g.parameters(), 1e-2), "d": torch.optim.Adam(d.parameters(), 1e-2)}

    def be_worker(here: Session) -> list[Tensor]:
        g, d = make_two()
        g, d = join(here, g, codec="float32"), join(here, d, codec="float32")
        own = optimizers(g, d)
        for number in range(4):
            step(g, d, here.run.worker, number, own)
        return [p.detach().clone() for p in (*g.parameters(), *d.parameters())]

    with Cluster(2, 2) as cluster:
        first, second = cluster.train(be_worker)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not torch.equal(first[0], make_two()[0].weight)


@pytest.mark.parametrize("codec", ["float32", "dct"])
def test_parameters_that_are_unfrozen_are_trained_from_then_on(codec: str):
    def be_worker(here: Session) -> list:
        model = make(here.run.worker)
        model.conv.requires_grad_(False)
        model = join(here, model, codec=codec)
        seen = []
        for step in range(4):
            model.conv.requires_grad_(step >= 2)
            backward(model, here.run.worker, step)
            seen.append(gradients(model))
            model.zero_grad()
        return seen

    with Cluster(2, 2) as cluster:
        first, second = cluster.train(be_worker)
    for step in range(4):
        assert same(first[step], second[step])
        assert (first[step]["conv.weight"] is None) == (step < 2)
        models = plain()
        for worker, model in enumerate(models):
            model.conv.requires_grad_(step >= 2)
            backward(model, worker, step)
        if codec == "float32":
            assert same(first[step], mean_of(models))


def test_a_parameter_that_only_one_worker_unfreezes_is_named():
    def be_worker(here: Session) -> None:
        model = make(here.run.worker)
        model.conv.requires_grad_(False)
        model = join(here, model, codec="float32")
        backward(model, here.run.worker, 0)
        if here.run.worker == 1:
            model.conv.requires_grad_(True)
            backward(model, here.run.worker, 1)

    with (
        Cluster(2, 1, join_timeout_s=0.5) as cluster,
        pytest.raises(JoinError, match=r"`conv\.weight`, `conv\.bias` \(2 in all\) are trained from now on"),
    ):
        cluster.train(be_worker)


def test_a_worker_that_comes_when_only_workers_have_the_parameters_is_refused():
    def be_worker(here: Session, model: nn.Module) -> None:
        backward(model, here.run.worker, 0)

    with Cluster(2, 1, timeout_s=5) as cluster:
        cluster.train(lambda here: be_worker(here, join(here, make(0), codec="float32")))
        with cluster.session(0) as here, pytest.raises(JoinError, match="only workers have the parameters"):
            join(here, make(0), codec="float32")


def test_what_does_not_go_with_means_is_refused(tmp_path):
    with Cluster(1, 1) as cluster, cluster.session(0) as here:
        with pytest.raises(UsageError, match="clip_norm"):
            join(here, make(0), clip_norm=1.0)
        for policy in ("local:4", "every:delay=1", "async"):
            with pytest.raises(UsageError, match="every backward pass"):
                join(here, make(0), policy=policy)
        model = join(here, make(0))
        with pytest.raises(UsageError, match="wrapped already"):
            join(here, model)
        embedding = join(here, nn.Embedding(5, 3, sparse=True))
        with pytest.raises(ShoestringError, match="sparse"):
            embedding(torch.tensor([1])).sum().backward()
    with (
        Cluster(1, 1, checkpoint=tmp_path) as cluster,
        cluster.session(0) as here,
        pytest.raises(UsageError, match=r"torch\.save"),
    ):
        join(here, make(0))
