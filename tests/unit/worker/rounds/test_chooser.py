"""`policy="auto"`: what is chosen, and that a run goes on from there as one that was told so."""

import copy
import threading

import pytest
import torch
from torch import nn

from shoestring.errors import JoinError
from shoestring.observe.events import EventLog
from shoestring.worker.rounds.auto import Outlook
from shoestring.worker.rounds.chooser import Chooser
from shoestring.worker.rounds.differences import DifferenceRounds
from shoestring.worker.rounds.gradients import GradientRounds
from shoestring.worker.rounds.policy import AutoPolicy, LocalSteps, make_policy
from shoestring.worker.session import Session
from shoestring.worker.wrap import join
from tests.unit.worker.cluster import Cluster

AT, STEPS = 6, 20  # when the change is decided, and how long it goes on
LATER = 3  # rounds until all make it
LOCAL = "local:h=4,delay=1,keep=yes"
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.05),
    "momentum": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, 1e-3),
}
_seeding = threading.Lock()


def chosen(outlook: Outlook, accuracy: str = "close") -> LocalSteps | None:
    found = Chooser(AutoPolicy(accuracy), lambda: outlook, lambda text: None).choose()
    policy = None if found is None else make_policy(found[0])
    assert policy is None or (isinstance(policy, LocalSteps) and found[1] == "dct:step=2")
    return policy


def outlook(compute_s: float, every_s: float, exchange_s: float) -> Outlook:
    return Outlook(compute_s, every_s, exchange_s, "dct:step=2")


def test_where_a_round_every_step_costs_little_it_stays():
    assert chosen(outlook(0.05, 0.055, 0.005)) is None
    assert chosen(outlook(0.05, 0.5, 0.02), "strict") is None


@pytest.mark.parametrize(("accuracy", "most"), [("close", 4), ("fast", 16)])
def test_the_slower_the_link_the_more_local_steps_up_to_the_bound(accuracy, most):
    found = [chosen(outlook(0.04, 0.04 + wait, wait / 3), accuracy) for wait in (0.05, 0.5, 5.0, 50.0)]
    steps = [policy.h for policy in found]
    assert steps == sorted(steps)
    assert steps[-1] == most


def test_an_answer_is_late_only_where_that_hides_something():
    assert chosen(outlook(0.04, 0.2, 0.001)).delay == 0
    assert chosen(outlook(0.04, 0.2, 0.02)).delay == 1


def test_it_is_asked_until_something_is_known_and_then_says_why_once():
    seen, said = [None, None, outlook(0.04, 0.4, 0.1)], []
    chooser = Chooser(AutoPolicy(), lambda: seen.pop(0), said.append)
    found = [chooser.choose() for _ in range(4)]
    assert found[:2] == [None, None]
    assert found[2] is not None
    assert found[3] is None
    assert len(said) == 1
    assert "local steps" in said[0]


@pytest.fixture
def decides(monkeypatch):
    """Have the first worker choose after a given round, whatever the links of this machine are like."""

    def choose(self):
        self.asked = getattr(self, "asked", 0) + 1
        return (LOCAL, "dct") if self.asked == AT else None

    monkeypatch.setattr(Chooser, "choose", choose)


def net() -> nn.Sequential:
    with _seeding:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(40, 200), nn.Tanh(), nn.Linear(200, 3))


def take(model: nn.Module, optimizer, step: int, worker: int, scaler=None) -> None:
    x = torch.randn(8, 40, generator=torch.Generator().manual_seed(10 * step + worker))
    loss = model(x).square().mean()
    if scaler is None:
        loss.backward()
        optimizer.step()
    else:
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    optimizer.zero_grad()


@pytest.mark.usefixtures("decides")
@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("is_scaled", [False, True])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_it_goes_on_as_a_run_that_begins_there(kind, is_scaled, shards):
    """The state at the change is taken aside, and another run begins with it and the chosen policy."""

    def be_worker(here: Session):
        model = net()
        optimizer = OPTIMIZERS[kind](model.parameters())
        model, optimizer = join(here, model, optimizer, policy="auto")
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10) if is_scaled else None
        there, calls = None, []
        optimizer.register_step_pre_hook(lambda *_: calls.append(1))
        for step in range(STEPS):
            if step == AT + LATER - 1:
                assert isinstance(optimizer.driver, GradientRounds)
            take(model, optimizer, step, here.run.worker, scaler)
            if step == AT + LATER - 1:
                assert isinstance(optimizer.driver, DifferenceRounds)
                there = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.inner.state_dict())
        assert optimizer.steps == STEPS == len(calls)
        assert optimizer.traffic.up > 0
        with optimizer.agreed():
            return there, optimizer.parameter_hash()

    with Cluster(2, shards) as cluster:
        results = cluster.train(be_worker)
    first, second = (there for there, _ in results)
    assert all(torch.equal(value, second[0][name]) for name, value in first[0].items())

    def go_on(here: Session) -> str:
        model = net()
        model.load_state_dict(first[0])
        optimizer = OPTIMIZERS[kind](model.parameters())
        optimizer.load_state_dict(copy.deepcopy(first[1]))
        model, optimizer = join(here, model, optimizer, policy=LOCAL, codec="dct")
        for step in range(AT + LATER, STEPS):
            take(model, optimizer, step, here.run.worker)
        with optimizer.agreed():
            return optimizer.parameter_hash()

    with Cluster(2, shards) as cluster:
        want = cluster.train(go_on)
    assert [found for _, found in results] == want
    assert len(set(want)) == 1


@pytest.mark.usefixtures("decides")
def test_who_comes_later_is_told_to_begin_anew():
    said = []

    def be_worker(here: Session):
        model = net()
        model, optimizer = join(here, model, OPTIMIZERS["sgd"](model.parameters()), policy="auto")
        for step in range(STEPS):
            take(model, optimizer, step, here.run.worker)
        meet.wait()
        if here.run.worker:
            return
        late = Session(here.run, "late", EventLog(None, "test"))
        own = net()
        with pytest.raises(JoinError) as caught:
            join(late, own, OPTIMIZERS["sgd"](own.parameters()), policy="auto")
        late.close()
        said.append(caught.value)

    meet = threading.Barrier(2)
    with Cluster(2, 1) as cluster:
        cluster.train(be_worker)
    assert "goes on with policy `local" in said[0].message


@pytest.mark.usefixtures("decides")
@pytest.mark.parametrize(
    "given", [{"codec": "float32"}, {"clip_norm": 1.0}, {"policy": "auto:strict"}, {"dtype": torch.bfloat16}]
)
def test_where_local_steps_do_not_fit_every_step_stays_a_round_and_a_line_says_why(
    given, monkeypatch, capsys
):
    dtype = given.pop("dtype", torch.float32)
    if given.get("policy"):
        monkeypatch.undo()

    def be_worker(here: Session) -> bool:
        model = net().to(dtype)
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        model, optimizer = join(here, model, optimizer, **({"policy": "auto"} | given))
        for step in range(STEPS):
            x = torch.randn(8, 40, generator=torch.Generator().manual_seed(step)).to(dtype)
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return isinstance(optimizer.driver, GradientRounds)

    with Cluster(2, 1) as cluster:
        assert cluster.train(be_worker) == [True, True]
    is_said = "policy `auto` stays with a round every step" in capsys.readouterr().err
    assert is_said == ("policy" not in given)  # who asks for `strict` knows
