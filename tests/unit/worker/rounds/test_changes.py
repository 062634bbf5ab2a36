"""Parameters that a script changes after `wrap` reach the shards, or are refused with the cure."""

import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn

from shoestring.config import Run
from shoestring.errors import ShoestringError, UsageError
from shoestring.observe.events import EventLog
from shoestring.worker.session import Session
from shoestring.worker.wrap import join
from tests.unit.worker.cluster import Cluster

_seeding = threading.Lock()


@pytest.fixture
def alone():
    here = Session(Run(), "1", EventLog(None, "test"))
    yield here
    here.close()


def deep(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Several parts."""
    with _seeding:
        torch.manual_seed(seed)
        layers = [nn.Linear(200, 200) for _ in range(4)]
    layers[0].weight.data = layers[0].weight.data.t()  # not contiguous: written piece by piece
    return nn.Sequential(*layers).to(dtype)


def loss_of(model: nn.Module, step: int, worker: int = 0) -> torch.Tensor:
    x = torch.randn(4, 200, generator=torch.Generator().manual_seed(10 * step + worker))
    return model(x.to(next(model.parameters()).dtype)).square().mean()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), 1e-3)


Change = Callable[[nn.Module, int, int], None]  # of (model, step, worker)


def train(model: nn.Module, optimizer, change: Change, worker: int = 0, steps: int = 5, *, late=False):
    """`change` comes before each step: before its forward pass, or after its backward pass."""
    for step in range(steps):
        if not late:
            change(model, step, worker)
        loss_of(model, step, worker).backward()
        if late:
            change(model, step, worker)
        optimizer.step()
        optimizer.zero_grad()


def load(step_of_change: int = 0) -> Change:
    def change(model: nn.Module, step: int, worker: int) -> None:
        if step == step_of_change:
            model.load_state_dict(deep(7, model[0].weight.dtype).state_dict())

    return change


def clamp(model: nn.Module, step: int, worker: int) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.clamp_(-0.03, 0.03)


def reinitialise_one(model: nn.Module, step: int, worker: int) -> None:
    if step == 2:
        with _seeding:
            torch.manual_seed(3)
            nn.init.normal_(model[2].weight, std=0.05)


def assert_close(model: nn.Module, other: nn.Module) -> None:
    for own, want in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(own, want, rtol=1e-4, atol=1e-5)


CHANGES = {"load": load(), "load later": load(3), "clamp": clamp, "reinitialise": reinitialise_one}


def test_a_script_that_changes_parameters_in_every_step_is_told_once_what_it_costs(alone, capsys):
    model = deep()
    model, optimizer = join(alone, model, adam(model), codec="dct", policy="every")
    train(model, optimizer, load(), steps=3)
    assert capsys.readouterr().err == ""
    train(model, optimizer, clamp, steps=3)
    assert capsys.readouterr().err.count("travel to the shards and back uncompressed") == 1


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("name", CHANGES)
def test_alone_a_change_does_what_it_does_in_plain_torch(alone, name, late):
    plain, model = deep(), deep()
    model, optimizer = join(alone, model, adam(model), codec="float32", policy="every")
    train(model, optimizer, CHANGES[name], late=late)
    train(plain, adam(plain), CHANGES[name], late=late)
    assert_close(model, plain)


def run(change: Change, shards: int = 2, codec: str = "float32", policy: str = "every", **more) -> list[str]:
    dtype = more.pop("dtype", torch.float32)

    def be_worker(here: Session) -> str:
        model = deep(dtype=dtype)
        model, optimizer = join(here, model, adam(model), codec=codec, policy=policy)
        train(model, optimizer, change, here.run.worker, **more)
        return optimizer.parameter_hash()

    with Cluster(2, shards, join_timeout_s=20.0) as cluster:
        return cluster.train(be_worker)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("codec", ["float32", "dct"])
@pytest.mark.parametrize("name", CHANGES)
def test_workers_that_change_alike_stay_alike_on_any_number_of_shards(name, codec, dtype):
    hashes = [run(CHANGES[name], shards, codec, dtype=dtype) for shards in (1, 3)]
    assert len({digest for each in hashes for digest in each}) == 1
    assert hashes[0] != run(lambda *_: None, 1, codec, dtype=dtype)


def test_loading_after_wrap_is_as_loading_before():
    def be_worker(here: Session) -> str:
        model = deep()
        load()(model, 0, 0)
        model, optimizer = join(here, model, adam(model), codec="float32", policy="every")
        train(model, optimizer, lambda *_: None, here.run.worker)
        return optimizer.parameter_hash()

    with Cluster(2, 2) as cluster:
        assert cluster.train(be_worker) == run(load())


def test_the_first_workers_values_count():
    def differently(model: nn.Module, step: int, worker: int) -> None:
        if step == 2:
            with torch.no_grad():
                model[1].bias.fill_(0.25 + worker)

    def be_worker(here: Session) -> tuple[float, str]:
        model = deep()
        model, optimizer = join(
            here, model, torch.optim.SGD(model.parameters(), 0.0), codec="dct", policy="every"
        )
        train(model, optimizer, differently, here.run.worker)
        return model[1].bias.mean().item(), optimizer.parameter_hash()

    with Cluster(2, 2) as cluster:
        (first, digest), (second, other) = cluster.train(be_worker)
    assert first == second == 0.25
    assert digest == other


@pytest.mark.parametrize("worker", [0, 1])
def test_a_change_on_one_worker_alone_is_refused_and_named(worker):
    def change(model: nn.Module, step: int, own: int) -> None:
        if step == 2 and own == worker:
            with torch.no_grad():
                model[3].bias.zero_()

    with pytest.raises(ShoestringError, match=f"`3.bias`.*on worker {worker} alone.*before `wrap`"):
        run(change)


@pytest.mark.parametrize("workers", [{0}, {1}, {0, 1}])
@pytest.mark.parametrize("codec", ["float32", "dct"])
def test_a_change_past_torchs_notice_is_refused_and_named(workers, codec):
    def change(model: nn.Module, step: int, worker: int) -> None:
        if step >= 2 and worker in workers:
            model[2].weight.data.mul_(0.5)

    with pytest.raises(ShoestringError, match="`2.weight` of worker .*no_grad.*wrap\\(model\\)"):
        run(change, codec=codec, steps=20)


def test_a_change_that_is_taken_back_before_the_next_step_is_nobodys_business():
    def swap(model: nn.Module, step: int, worker: int) -> None:
        """As with an average that is evaluated on one worker."""
        if worker == 0 and step:
            kept = [parameter.data.clone() for parameter in model.parameters()]
            for parameter in model.parameters():
                parameter.data.zero_()
            for parameter, values in zip(model.parameters(), kept, strict=True):
                parameter.data.copy_(values)

    assert run(swap) == run(lambda *_: None)


def test_a_skipped_step_keeps_a_change():
    def be_worker(here: Session) -> list[str]:
        model = deep()
        model, optimizer = join(here, model, adam(model), codec="dct", policy="every")
        hashes = []
        for step in range(4):
            if step == 2:
                load(2)(model, 2, 0)
                hashes.append(optimizer.parameter_hash())
            loss = loss_of(model, step, here.run.worker)
            (loss * float("nan") if step == 2 and here.run.worker else loss).backward()
            optimizer.step()
            optimizer.zero_grad()
            hashes.append(optimizer.parameter_hash())
        return hashes

    with Cluster(2, 2) as cluster:
        first, second = cluster.train(be_worker)
    assert first == second
    assert first[2] == first[3] != first[4]


@pytest.mark.parametrize("codec", ["float32", "dct"])
def test_with_a_delay_parameters_may_be_loaded_before_the_first_step_alone(codec):
    def change_twice(model: nn.Module, step: int, worker: int) -> None:
        load()(model, step, worker)
        load(3)(model, step, worker)

    first, second = run(load(), codec=codec, policy="every:delay=1")
    assert first == second
    assert first != run(lambda *_: None, codec=codec, policy="every:delay=1")[0]
    with pytest.raises(UsageError, match="policy=.every"):
        run(change_twice, codec=codec, policy="every:delay=1")


@pytest.mark.parametrize("policy", ["bounded:2", "async"])
def test_where_workers_do_not_wait_a_change_is_refused(policy):
    with pytest.raises(UsageError, match="`0.weight`.*before `wrap`"):
        run(load(), policy=policy)


def test_a_parameter_that_is_replaced_is_refused(alone):
    model = deep()
    model, optimizer = join(alone, model, adam(model), codec="float32", policy="every")
    model.load_state_dict(deep(7).state_dict(), assign=True)
    with pytest.raises(UsageError, match="parameters that the wrapped model has not.*assign=True"):
        loss_of(model, 0).backward()
    with pytest.raises(UsageError, match="assign=True"):
        optimizer.step()


@pytest.mark.parametrize("codec", ["float32", "dct"])
@pytest.mark.parametrize("name", CHANGES)
def test_local_steps_take_a_change_along_without_loss(alone, name, codec):
    plain, model = deep(), deep()
    model, optimizer = join(alone, model, adam(model), codec=codec, policy="local:2")
    steps = {"load": 4, "load later": 4, "clamp": 4, "reinitialise": 4}[name]
    train(model, optimizer, CHANGES[name], steps=steps)
    train(plain, adam(plain), CHANGES[name], steps=steps)
    if codec == "float32" or name == "clamp":  # which changes something before every round
        assert_close(model, plain)
    else:
        assert (model[2].weight - plain[2].weight).abs().max() < 0.02


def test_local_steps_that_go_further_than_the_workers_refuse_a_change(alone):
    model = deep()
    model, optimizer = join(alone, model, adam(model), codec="float32", policy="local:h=2,outer=nesterov")
    with pytest.raises(UsageError, match="outer="):
        train(model, optimizer, load(2))
