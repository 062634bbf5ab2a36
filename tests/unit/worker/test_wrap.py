"""What a training script may do with a wrapped model and optimizer."""

import threading

import pytest
import torch
from torch import nn

from shoestring.config import Run
from shoestring.errors import JoinError, UnknownCodecError, UsageError
from shoestring.observe.events import EventLog
from shoestring.worker.rounds.policy import Async, Bounded, EveryStep, LocalSteps
from shoestring.worker.session import Session
from shoestring.worker.wrap import join
from tests.unit.worker.cluster import Cluster

_seeding = threading.Lock()


@pytest.fixture
def alone():
    here = Session(Run(), "1", EventLog(None, "test"))
    yield here
    here.close()


def small(seed: int = 0) -> nn.Module:
    with _seeding:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 3))


def data(worker: int = 0, step: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(100 * step + worker)
    return torch.randn(16, 6, generator=source), torch.randint(0, 3, (16,), generator=source)


def close_to(model: nn.Module, other: nn.Module, ulps: int = 64) -> bool:
    """Equal but for sums in another order: a few units in the last place of the largest value."""
    for own, want in zip(model.parameters(), other.parameters(), strict=True):
        bound = ulps * torch.finfo(torch.float32).eps * max(1.0, want.detach().abs().max().item())
        if (own - want).detach().abs().max().item() > bound:
            return False
    return True


def train(model: nn.Module, optimizer, steps: int = 5, **kwargs) -> None:
    for step in range(steps):
        x, y = data(step=step)
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1),
    "nesterov": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, 0.01),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_alone_and_uncompressed_it_trains_as_torch_does(alone: Session, name: str) -> None:
    plain, wrapped = small(), small()
    inner = OPTIMIZERS[name](wrapped.parameters())
    wrapped, shared = join(alone, wrapped, inner, codec="float32", policy="every")
    train(wrapped, shared)
    train(plain, OPTIMIZERS[name](plain.parameters()))
    assert close_to(wrapped, plain)
    assert list(wrapped.state_dict()) == list(plain.state_dict())


def test_schedulers_and_groups_reach_the_shards(alone: Session) -> None:
    def build(model: nn.Module) -> torch.optim.Optimizer:
        first, second = model[0], model[2]
        return torch.optim.SGD(
            [
                {"params": first.parameters()},
                {"params": second.parameters(), "lr": 0.01, "weight_decay": 0.1},
            ],
            0.1,
            momentum=0.5,
        )

    def run(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        for step in range(6):
            x, y = data(step=step)
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()

    plain, wrapped = small(), small()
    wrapped, shared = join(alone, wrapped, build(wrapped), codec="float32", policy="every")
    run(wrapped, shared)
    run(plain, build(plain))
    assert close_to(wrapped, plain)


def test_accumulated_gradients_are_sent_once(alone: Session) -> None:
    plain, wrapped = small(), small()
    wrapped, shared = join(
        alone, wrapped, torch.optim.SGD(wrapped.parameters(), 0.1), codec="float32", policy="every"
    )
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    for step in range(4):
        for part in range(3):
            x, y = data(worker=part, step=step)
            nn.functional.cross_entropy(plain(x), y).backward()
            if part < 2:
                with wrapped.no_sync():
                    nn.functional.cross_entropy(wrapped(x), y).backward()
            else:
                nn.functional.cross_entropy(wrapped(x), y).backward()
        optimizer.step()
        shared.step()
        optimizer.zero_grad()
        shared.zero_grad()
    assert close_to(wrapped, plain)


def test_a_second_backward_without_no_sync_is_refused(alone: Session) -> None:
    model, _ = join(
        alone, m := small(), torch.optim.SGD(m.parameters(), 0.1), codec="float32", policy="every"
    )
    x, y = data()
    nn.functional.cross_entropy(model(x), y).backward()
    with pytest.raises(UsageError, match="second backward"):
        nn.functional.cross_entropy(model(x), y).backward()


def test_a_gradient_changed_after_it_was_sent_is_refused(alone: Session) -> None:
    model, shared = join(
        alone, m := small(), torch.optim.SGD(m.parameters(), 0.1), codec="float32", policy="every"
    )
    x, y = data()
    nn.functional.cross_entropy(model(x), y).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    with pytest.raises(UsageError, match="was changed after it was sent"):
        shared.step()


def test_clipping_is_by_the_norm_over_all_parameters(alone: Session) -> None:
    plain, wrapped = small(), small()
    inner = torch.optim.SGD(wrapped.parameters(), 0.5)
    wrapped, shared = join(alone, wrapped, inner, codec="float32", policy="every", clip_norm=0.01)
    optimizer = torch.optim.SGD(plain.parameters(), 0.5)
    train(wrapped, shared, 4)
    for step in range(4):
        x, y = data(step=step)
        nn.functional.cross_entropy(plain(x), y).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
    assert close_to(wrapped, plain)


class Branches(nn.Module):
    """One layer is used in even steps, one in odd ones; a weight is shared; one layer is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.even, self.odd = nn.Linear(6, 6), nn.Linear(6, 3), nn.Linear(6, 3)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.tied = nn.Linear(6, 6)
        self.tied.weight = self.first.weight

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        hidden = self.tied(torch.tanh(self.first(self.frozen(x))))
        return self.even(hidden) if step % 2 == 0 else self.odd(hidden)


@pytest.mark.parametrize("name", ["nesterov", "adamw"])
def test_frozen_shared_and_unused_parameters_fare_as_with_torch(alone: Session, name: str) -> None:
    torch.manual_seed(1)
    plain = Branches()
    wrapped = Branches()
    wrapped.load_state_dict(plain.state_dict())
    own = OPTIMIZERS[name](plain.parameters())
    wrapped, shared = join(
        alone, wrapped, OPTIMIZERS[name](wrapped.parameters()), codec="float32", policy="every"
    )
    for step in range(7):
        for model, optimizer in ((plain, own), (wrapped, shared)):
            x, y = data(step=step)
            nn.functional.cross_entropy(model(x, step), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert close_to(wrapped, plain)


def test_bfloat16_autocast_trains(alone: Session) -> None:
    model, shared = join(
        alone, m := small(), torch.optim.SGD(m.parameters(), 0.1), codec="dct", policy="every"
    )
    losses = []
    for _ in range(30):
        x, y = data()
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        shared.step()
        shared.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_channels_last_weights_are_written_in_place(alone: Session) -> None:
    torch.manual_seed(0)
    model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    before = model.weight.detach().clone()
    model, shared = join(
        alone, model, torch.optim.SGD(model.parameters(), 1.0), codec="float32", policy="every"
    )
    model(torch.ones(1, 3, 3, 3)).sum().backward()
    shared.step()
    assert torch.equal(model.weight.detach(), before - 1)
    assert model.weight.is_contiguous(memory_format=torch.channels_last)


def test_nan_gradients_skip_the_step_and_keep_nothing(alone: Session) -> None:
    model, shared = join(
        alone, m := small(), torch.optim.SGD(m.parameters(), 0.1), codec="dct", policy="every"
    )
    train(model, shared, 2)
    before = shared.parameter_hash()
    x, y = data()
    (nn.functional.cross_entropy(model(x), y) * float("nan")).backward()
    shared.step()
    shared.zero_grad()
    assert shared.parameter_hash() == before
    assert shared.steps == 3
    train(model, shared, 2)
    assert shared.parameter_hash() != before
    assert all(torch.isfinite(p).all() for p in model.parameters())


POLICIES = [
    EveryStep(),
    EveryStep(delay=1),
    EveryStep(delay=1, warmup=3),
    LocalSteps(3),
    LocalSteps(4, outer="nesterov", warmup=2),
    Bounded(2),
    Bounded(0, warmup=2),
    Async(),
]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("codec", ["float32", "dct"])
def test_every_policy_learns_with_three_workers(policy, codec: str) -> None:
    def be_worker(here: Session) -> tuple[float, float, str]:
        model = small()
        model, shared = join(
            here, model, torch.optim.SGD(model.parameters(), 0.05), codec=codec, policy=policy
        )
        losses = []
        for _ in range(24):
            x, y = data(here.run.worker)
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            shared.step()
            shared.zero_grad()
            losses.append(loss.item())
        return losses[0], losses[-1], shared.parameter_hash()

    with Cluster(3, 2) as cluster:
        results = cluster.train(be_worker)
    assert all(last < first for first, last, _ in results)
    if isinstance(policy, EveryStep | LocalSteps) and 24 % getattr(policy, "h", 1) == 0 and not policy.warmup:
        assert len({digest for _, _, digest in results}) == 1


def test_models_that_differ_are_refused_by_name() -> None:
    def be_worker(here: Session) -> None:
        model = nn.Sequential(nn.Linear(6, 32 + here.run.worker))
        join(here, model, torch.optim.SGD(model.parameters(), 0.1), codec="float32", policy="every")

    with Cluster(2, 1, timeout_s=0.5) as cluster, pytest.raises(JoinError, match="`0.weight`"):
        cluster.train(be_worker)


def test_bad_input_is_refused_before_anything_is_sent(alone: Session) -> None:
    model = small()
    with pytest.raises(UsageError, match="no rule for `RMSprop`"):
        join(alone, model, torch.optim.RMSprop(model.parameters()), codec=None, policy="async")
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(UnknownCodecError):
        join(alone, model, sgd, codec="zip", policy=None)
    with pytest.raises(UsageError, match="no sync policy"):
        join(alone, model, sgd, codec=None, policy="sometimes")
    with pytest.raises(UsageError, match="clip_norm"):
        join(alone, model, sgd, codec=None, policy="async", clip_norm=1.0)
    double = small().double()
    with pytest.raises(UsageError, match="torch.float64"):
        join(alone, double, torch.optim.SGD(double.parameters(), 0.1), codec=None, policy="local:2")
    with pytest.raises(UsageError, match="does not hold parameter `0.weight`"):
        join(alone, model, torch.optim.SGD(model[2].parameters(), 0.1), codec=None, policy="local:2")


@pytest.mark.parametrize("other", ["async", "bounded:4", "every:delay=1", "local:4"])
def test_workers_with_different_policies_do_not_train_together(other):
    def be_worker(here: Session) -> None:
        model = nn.Linear(3, 2)
        policy = "every" if here.run.worker == 0 else other
        join(here, model, torch.optim.SGD(model.parameters(), 0.1), codec="float32", policy=policy)

    with Cluster(2, 1, join_timeout_s=5.0) as cluster, pytest.raises(JoinError, match=r"policy is|rule is"):
        cluster.train(be_worker)


def test_a_small_model_uses_fewer_shards_says_so_and_waits_for_no_other(capsys) -> None:
    def be_worker(here: Session) -> str:
        model = small()
        model, optimizer = join(here, model, torch.optim.SGD(model.parameters(), 0.1), policy="every")
        for step in range(3):
            x, y = data(here.run.worker, step)
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        return optimizer.parameter_hash()

    with Cluster(2, 2) as cluster:
        both = cluster.train(be_worker)
    said = "shoestring: worker 0: a model of 323 parameters uses 1 of 2 shards\n"
    assert capsys.readouterr().err == said
    with Cluster(2, 2) as cluster:
        cluster.addresses = (cluster.addresses[0], "tcp://127.0.0.1:1")  # nobody listens there
        assert cluster.train(be_worker) == both
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    ("policy", "says"),
    [("every", None), ("local:2", "each worker's own"), ("async", "one worker's gradient")],
)
def test_a_policy_under_which_moments_are_not_ddps_says_so_once(
    policy: str, says: str | None, capsys
) -> None:
    def be_worker(here: Session) -> None:
        model = small()
        join(here, model, torch.optim.SGD(model.parameters(), 0.1), codec="float32", policy=policy)

    with Cluster(2, 1) as cluster:
        cluster.train(be_worker)
    told = capsys.readouterr().err
    assert told.count("moments") == (says is not None)
    assert says is None or says in told
