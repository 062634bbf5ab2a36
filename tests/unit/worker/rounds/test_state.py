"""The state of the optimizer on the shards, as a script reads, saves, loads and changes it."""

import copy
import threading
from functools import partial

import pytest
import torch
from torch import nn

from shoestring.config import Run
from shoestring.errors import RuleError, ShoestringError
from shoestring.observe.events import EventLog
from shoestring.wire import messages as say
from shoestring.worker.session import Session
from shoestring.worker.wrap import join
from tests.unit.worker.cluster import Cluster

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 1e-4),
    "momentum": lambda p: torch.optim.SGD(p, 1e-5, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, 1e-4),
    "adamw": lambda p: torch.optim.AdamW(p, 1e-4, weight_decay=0.1),
    "amsgrad": lambda p: torch.optim.AdamW(p, 1e-4, amsgrad=True),
}
_seeding = threading.Lock()


@pytest.fixture
def alone():
    here = Session(Run(), "1", EventLog(None, "test"))
    yield here
    here.close()


class Net(nn.Module):
    """Tensors over several parts, one in channels last, and one that only every second step uses."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        self.wide, self.out = nn.Linear(8, 9000), nn.Linear(9000, 3)
        self.seldom, self.never = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        x = self.out(torch.tanh(self.wide(self.image(x).mean((2, 3)))))
        return self.seldom(x) if step % 2 else x


def net() -> Net:
    with _seeding:
        torch.manual_seed(0)
        return Net()


def loss_of(model: nn.Module, step: int, worker: int = 0) -> torch.Tensor:
    x = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(100 * step + worker))
    return model(x, step).square().mean()


def train(model: nn.Module, optimizer, steps, worker: int = 0) -> list[float]:
    losses = []
    for step in steps:
        loss = loss_of(model, step, worker)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def wrapped(here: Session, model: nn.Module, optimizer, codec: str = "float32", policy: str = "every"):
    return join(here, model, optimizer, codec=codec, policy=policy)[1]


def assert_alike(own: dict, want: dict, **tolerance) -> None:
    """The same state but for rounding; the same names, types, shapes, strides and devices."""
    assert own["param_groups"] == want["param_groups"]
    assert sorted(own["state"]) == sorted(want["state"])
    for index, values in want["state"].items():
        assert list(own["state"][index]) == list(values)
        for name, value in values.items():
            found = own["state"][index][name]
            assert (found.dtype, found.device, found.shape) == (value.dtype, value.device, value.shape)
            assert found.stride() == value.stride()
            torch.testing.assert_close(found, value, **({"rtol": 1e-4, "atol": 1e-7} | tolerance))


def bits(state: dict) -> list:
    return [
        (index, name, value.numpy().tobytes())
        for index, values in state["state"].items()
        for name, value in values.items()
    ]


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_saved_state_is_torchs_own_and_plain_torch_goes_on_from_it(alone, kind, tmp_path):
    plain, model = net(), net()
    own = OPTIMIZERS[kind](plain.parameters())
    optimizer = wrapped(alone, model, OPTIMIZERS[kind](model.parameters()))
    assert optimizer.state_dict() == own.state_dict()
    train(plain, own, range(5))
    train(model, optimizer, range(5))
    assert_alike(optimizer.state_dict(), own.state_dict())
    torch.save([model.state_dict(), optimizer.state_dict()], tmp_path / "saved.pt")
    weights, state = torch.load(tmp_path / "saved.pt", weights_only=True)
    other = net()
    other.load_state_dict(weights)
    third = OPTIMIZERS[kind](other.parameters())
    third.load_state_dict(state)
    went_on = train(model, optimizer, range(5, 9))
    assert train(other, third, range(5, 9)) == pytest.approx(went_on, rel=1e-4)
    assert_alike(optimizer.state_dict(), third.state_dict())


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_state_of_plain_torch_goes_on_at_the_shards(alone, kind, when):
    plain, model = net(), net()
    own, inner = OPTIMIZERS[kind](plain.parameters()), OPTIMIZERS[kind](model.parameters())
    train(plain, own, range(5))
    model.load_state_dict(plain.state_dict())
    state = copy.deepcopy(own.state_dict())
    state["param_groups"][0]["lr"] = 7e-5
    own.load_state_dict(state)
    if when == "before":
        inner.load_state_dict(state)
    optimizer = wrapped(alone, model, inner)
    if when == "after":
        optimizer.load_state_dict(state)
    assert bits(optimizer.state_dict()) == bits(own.state_dict())
    assert train(model, optimizer, range(5, 9)) == pytest.approx(train(plain, own, range(5, 9)), rel=1e-4)
    assert_alike(optimizer.state_dict(), own.state_dict())


def test_an_empty_state_that_is_loaded_starts_moments_anew(alone):
    model, plain = net(), net()
    own = OPTIMIZERS["adam"](plain.parameters())
    optimizer = wrapped(alone, model, OPTIMIZERS["adam"](model.parameters()))
    fresh = copy.deepcopy(optimizer.state_dict())
    for net_, steps in ((model, optimizer), (plain, own)):
        train(net_, steps, range(3))
        steps.load_state_dict(fresh)
        assert steps.state_dict()["state"] == {}
        train(net_, steps, range(3, 5))
    assert_alike(optimizer.state_dict(), own.state_dict())


@pytest.mark.parametrize("codec", ["float32", "dct"])
@pytest.mark.parametrize("policy", ["every", "every:delay=1"])
def test_one_worker_alone_saves_and_training_is_the_same(codec, policy):
    def run(saver: int | None) -> list:
        def be_worker(here: Session) -> tuple[str, list]:
            model = net()
            optimizer = wrapped(here, model, OPTIMIZERS["adamw"](model.parameters()), codec, policy)
            seen = []
            for step in range(6):
                loss_of(model, step, here.run.worker).backward()
                if here.run.worker == saver and step == 4:  # gradients are on their way
                    seen.append(bits(optimizer.state_dict()))
                optimizer.step()
                optimizer.zero_grad()
                if here.run.worker == saver and step == 3:
                    seen.append(bits(optimizer.state_dict()))
            return optimizer.parameter_hash(), seen

        with Cluster(2, 2) as cluster:
            return cluster.train(be_worker)

    (first, _), (second, _) = run(None)
    (own, seen), (other, _) = run(0)
    assert (own, other) == (first, second)
    assert seen[0] == seen[1] != []


def test_all_workers_see_the_same_state_of_one_round():
    def be_worker(here: Session) -> list:
        model = net()
        optimizer = wrapped(here, model, OPTIMIZERS["amsgrad"](model.parameters()), "dct")
        train(model, optimizer, range(4), here.run.worker)
        return bits(optimizer.state_dict())

    with Cluster(3, 2) as cluster:
        states = cluster.train(be_worker)
    assert states[0] == states[1] == states[2]
    counts = {name: {value for _, own, value in states[0] if own == name} for name in ("step",)}
    assert len(counts["step"]) == 2  # of what is used in every step, and of what is used in every second


@pytest.mark.parametrize("codec", ["float32", "dct"])
@pytest.mark.parametrize("policy", ["every", "every:delay=1"])
def test_all_workers_load_and_the_first_ones_state_counts(codec, policy):
    saved = {}

    def be_worker(here: Session) -> tuple[str, list]:
        model = net()
        optimizer = wrapped(here, model, OPTIMIZERS["adamw"](model.parameters()), codec, policy)
        train(model, optimizer, range(3), here.run.worker)
        state = copy.deepcopy(optimizer.state_dict())
        if here.run.worker:
            state["state"][0]["exp_avg"] += 1
        else:
            saved["first"] = bits(state)
        train(model, optimizer, range(3, 5), here.run.worker)
        optimizer.load_state_dict(state)
        train(model, optimizer, range(5, 6), here.run.worker)
        counts = {float(values["step"]) for values in optimizer.state_dict()["state"].values()}
        assert max(counts) == 4
        return optimizer.parameter_hash(), bits(optimizer.state_dict())

    with Cluster(2, 2) as cluster:
        (first, state), (second, other) = cluster.train(be_worker)
    assert state == other
    if policy == "every":
        assert first == second


def test_a_state_that_one_worker_alone_loads_is_refused():
    def be_worker(here: Session) -> None:
        model = net()
        optimizer = wrapped(here, model, OPTIMIZERS["adamw"](model.parameters()))
        train(model, optimizer, range(2), here.run.worker)
        if here.run.worker == 1:
            state = copy.deepcopy(optimizer.state_dict())
            state["state"][0]["exp_avg"] += 1
            optimizer.load_state_dict(state)
        train(model, optimizer, range(2, 3), here.run.worker)

    with Cluster(2, 2) as cluster, pytest.raises(ShoestringError, match="on worker 1 alone"):
        cluster.train(be_worker)


def test_a_state_that_is_loaded_as_it_was_saved_costs_nothing():
    puts = []

    def be_worker(here: Session) -> None:
        model = net()
        optimizer = wrapped(here, model, OPTIMIZERS["adamw"](model.parameters()))
        optimizer.load_state_dict(optimizer.state_dict())  # as Accelerate does, before the first step
        train(model, optimizer, range(2), here.run.worker)
        if here.run.worker == 0:
            optimizer.load_state_dict(optimizer.state_dict())
        train(model, optimizer, range(2, 3), here.run.worker)

    with Cluster(2, 1) as cluster:
        handle = cluster.shards[0].handle

        def note(sender, message, payload, now):
            if isinstance(message, say.Put):
                puts.append(message)
            handle(sender, message, payload, now)

        cluster.shards[0].handle = note
        cluster.train(be_worker)
    assert puts == []


@pytest.mark.parametrize("lost", [say.AskState, say.Put, say.Commit])
def test_what_is_lost_on_the_way_is_said_again(monkeypatch, lost):
    monkeypatch.setattr("shoestring.worker.protocol.requests.Request.pause_s", 0.05)
    monkeypatch.setattr("shoestring.worker.protocol.worker.BEAT_S", 0.02)
    monkeypatch.setattr("shoestring.worker.exchange.BEAT_S", 0.02)
    dropped = []

    def lose(handle, sender, message, payload, now):
        if isinstance(message, lost) and len(dropped) < 2:
            dropped.append(message)
        else:
            handle(sender, message, payload, now)

    with Cluster(1, 2, ask_after_s=0.05) as cluster:
        for shard in cluster.shards:
            shard.handle = partial(lose, shard.handle)
        with cluster.session(0) as here:
            model = net()
            optimizer = wrapped(here, model, OPTIMIZERS["adamw"](model.parameters()))
            train(model, optimizer, range(2))
            state = copy.deepcopy(optimizer.state_dict())
            optimizer.load_state_dict(state)
            train(model, optimizer, range(2, 3))
            assert max(float(values["step"]) for values in optimizer.state_dict()["state"].values()) == 3
    assert len(dropped) == 2


def test_what_a_script_changes_in_the_state_counts(alone):
    plain, model = net(), net()
    own = OPTIMIZERS["adam"](plain.parameters())
    optimizer = wrapped(alone, model, OPTIMIZERS["adam"](model.parameters()))
    for net_, steps in ((model, optimizer), (plain, own)):
        train(net_, steps, range(3))
        for parameter in net_.wide.parameters():
            steps.state[parameter]["exp_avg"].mul_(0.1)
        train(net_, steps, range(3, 5))
        del steps.state[net_.out.weight]
        steps.state[net_.out.bias]["step"].fill_(7)
        train(net_, steps, range(5, 6))
        assert len(steps.state) == len(steps.state_dict()["state"])
    assert_alike(optimizer.state_dict(), own.state_dict())


def test_a_state_that_was_read_is_not_kept_for_later(alone):
    model = net()
    optimizer = wrapped(alone, model, OPTIMIZERS["adam"](model.parameters()))
    train(model, optimizer, range(2))
    assert len(optimizer.state) == 8
    before = bits(optimizer.state_dict())
    train(model, optimizer, range(2, 3))
    assert optimizer.inner.state == {}
    assert bits(optimizer.state_dict()) != before


UNFIT = {
    "amsgrad": lambda state: state["state"][0].pop("exp_avg_sq"),
    "another optimizer": lambda state: state["state"][0].update(square_avg=torch.zeros(3)),
    "another shape": lambda state: state["state"][0].update(exp_avg=torch.zeros(3)),
    "half a step": lambda state: state["state"][0].update(step=torch.tensor(1.5)),
    "a negative step": lambda state: state["state"][0].update(step=torch.tensor(-1.0)),
}


@pytest.mark.parametrize("what", UNFIT)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(alone, what):
    model = net()
    optimizer = wrapped(alone, model, OPTIMIZERS["adam"](model.parameters()))
    train(model, optimizer, range(2))
    state = copy.deepcopy(optimizer.state_dict())
    before = bits(state)
    UNFIT[what](state)
    state["param_groups"][0]["lr"] = 9.0
    with pytest.raises(RuleError, match="`image.weight`"):
        optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == 1e-4
    train(model, optimizer, range(2, 3))
    assert bits(optimizer.state_dict()) != before


def test_a_state_that_does_not_fit_is_refused_by_wrap(alone):
    model = net()
    inner = OPTIMIZERS["momentum"](model.parameters())
    train(model, inner, range(1))
    inner.param_groups[0]["momentum"] = 0.0
    with pytest.raises(RuleError, match="`momentum_buffer`, shards keep nothing"):
        wrapped(alone, model, inner)


@pytest.mark.parametrize("policy", ["bounded:2", "async"])
def test_other_policies_take_the_first_workers_state(policy):
    def be_worker(here: Session) -> None:
        model = net()
        optimizer = wrapped(here, model, OPTIMIZERS["adamw"](model.parameters()), policy=policy)
        state = {
            index: {
                "step": torch.tensor(100.0),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
            for index, parameter in enumerate(model.parameters())
        }
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
        train(model, optimizer, range(6), here.run.worker)
        if here.run.worker == 0:
            counts = [float(values["step"]) for values in optimizer.state_dict()["state"].values()]
            assert 104 <= max(counts) <= 112

    with Cluster(2, 2) as cluster:
        cluster.train(be_worker)


def test_moments_of_parameters_in_two_bytes_are_saved_and_loaded_in_float32():
    """A run that saves and loads ends with the bits of one that goes on."""

    def be_worker(here: Session, *, is_loaded: bool) -> str:
        model = net().bfloat16()
        optimizer = wrapped(here, model, OPTIMIZERS["adamw"](model.parameters()))
        for step in range(4):
            x = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(step)).bfloat16()
            model(x, step).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            state = copy.deepcopy(optimizer.state_dict())
            if is_loaded:
                optimizer.load_state_dict(state)
        assert {value["exp_avg"].dtype for value in state["state"].values()} == {torch.float32}
        plain = OPTIMIZERS["adamw"](model.parameters())
        plain.load_state_dict(state)
        assert plain.state[model.out.bias]["exp_avg"].dtype == torch.bfloat16
        return optimizer.parameter_hash()

    with Cluster(2, 2) as cluster:
        went_on = cluster.train(lambda here: be_worker(here, is_loaded=False))
    with Cluster(2, 2) as cluster:
        assert cluster.train(lambda here: be_worker(here, is_loaded=True)) == went_on


def test_local_steps_keep_the_workers_own_state(alone):
    model, plain = net(), net()
    own = OPTIMIZERS["adamw"](plain.parameters())
    inner = OPTIMIZERS["adamw"](model.parameters())
    train(plain, own, range(2))
    inner.load_state_dict(own.state_dict())
    optimizer = wrapped(alone, model, inner, policy="local:2")
    assert bits(optimizer.state_dict()) == bits(own.state_dict())
    train(model, optimizer, range(3))
    assert optimizer.state_dict()["state"][0]["step"] == 5
    optimizer.load_state_dict(own.state_dict())
    assert bits(optimizer.state_dict()) == bits(own.state_dict())


def test_a_parameter_without_values_has_the_state_that_torch_gives_it(alone):
    def trained(join_it) -> torch.optim.Optimizer:
        with _seeding:
            torch.manual_seed(0)
            model: nn.Module = nn.Linear(3, 3)
        model.nothing = nn.Parameter(torch.zeros(0, 3))
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        if join_it:
            model, optimizer = join(alone, model, optimizer, codec="float32")
        for _ in range(3):
            (model(torch.ones(1, 3)).square().sum() + model.nothing.sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
        return optimizer.state_dict()["state"]

    own, ours = trained(False), trained(True)
    assert own.keys() == ours.keys()
    for index, state in own.items():
        assert state["step"] == ours[index]["step"] == 3
        assert state["exp_avg"].shape == ours[index]["exp_avg"].shape
