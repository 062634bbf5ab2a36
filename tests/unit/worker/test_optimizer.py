"""The optimizer that `wrap` gives stands in for torch's: groups, schedulers and hooks."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn

from shoestring.config import Run
from shoestring.errors import RuleError, UsageError
from shoestring.observe.events import EventLog
from shoestring.worker.session import Session
from shoestring.worker.wrap import join

SCHEDULERS = {
    "step": lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.2, total_steps=20),
    "plateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "warm up": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [
            torch.optim.lr_scheduler.LinearLR(o, 0.1, total_iters=3),
            torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
        ],
        [3],
    ),
}
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01),
}


@pytest.fixture
def alone():
    here = Session(Run(), "1", EventLog(None, "test"))
    yield here
    here.close()


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 3))


def shared(here: Session, model: nn.Module, optimizer, policy: str = "every"):
    return join(here, model, optimizer, codec="float32", policy=policy)[1]


def train(model: nn.Module, optimizer, scheduler=None, steps: int = 6) -> None:
    for step in range(steps):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            scheduler.step(1.0)
        elif scheduler is not None:
            scheduler.step()


def assert_close(model: nn.Module, other: nn.Module) -> None:
    for own, want in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(own, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("is_before", [True, False])
def test_a_scheduler_from_before_wrap_or_after_it_drives_the_shards(alone, kind, name, is_before):
    plain, model = small(), small()
    own, inner = OPTIMIZERS[kind](plain.parameters()), OPTIMIZERS[kind](model.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        want = SCHEDULERS[name](own)
        scheduler = SCHEDULERS[name](inner) if is_before else None
        optimizer = shared(alone, model, inner)
        scheduler = scheduler or SCHEDULERS[name](optimizer)
        train(model, optimizer, scheduler)
        train(plain, own, want)
    assert optimizer.param_groups is inner.param_groups
    assert scheduler.get_last_lr() == want.get_last_lr()
    assert_close(model, plain)


def test_loaded_rates_are_the_ones_it_trains_at(alone):
    plain, model = small(), small()
    own, inner = OPTIMIZERS["sgd"](plain.parameters()), OPTIMIZERS["sgd"](model.parameters())
    optimizer = shared(alone, model, inner)
    for target in (own, optimizer):
        target.load_state_dict(target.state_dict())  # as Accelerate does
        groups = target.state_dict()["param_groups"]
        groups[0] |= {"lr": 0.003, "momentum": 0.5}
        target.load_state_dict({"state": {}, "param_groups": groups})
        assert target.param_groups[0]["lr"] == 0.003
    assert optimizer.param_groups is inner.param_groups
    train(model, optimizer)
    train(plain, own)
    assert_close(model, plain)
    for target in (own, optimizer):
        target.param_groups[0]["lr"] = 0.5
    train(model, optimizer)
    train(plain, own)
    assert_close(model, plain)


@pytest.mark.parametrize(
    ("kind", "changed"),
    [("adamw", {"amsgrad": True}), ("adamw", {"maximize": True}), ("sgd", {"nesterov": True})],
)
def test_settings_that_the_shards_rule_lacks_are_refused_and_change_nothing(alone, kind, changed):
    model = small()
    optimizer = shared(alone, model, OPTIMIZERS[kind](model.parameters()))
    state = optimizer.state_dict()
    groups = copy.deepcopy(state["param_groups"])
    groups[0] |= {"lr": 0.7} | changed
    before = optimizer.param_groups
    with pytest.raises(RuleError, match="was False when it was wrapped"):
        optimizer.load_state_dict({"state": {}, "param_groups": groups})
    assert optimizer.param_groups is before
    assert optimizer.state_dict() == state
    optimizer.param_groups[0].update(changed)
    with pytest.raises(RuleError, match="before `wrap`"):
        train(model, optimizer, steps=1)


def test_a_momentum_that_the_rule_lacks_is_refused(alone):
    model = small()
    optimizer = shared(alone, model, torch.optim.SGD(model.parameters(), 0.1))
    optimizer.param_groups[0]["momentum"] = 0.9
    with pytest.raises(RuleError, match="`momentum` of the optimizer is 0.9, and was 0"):
        train(model, optimizer, steps=1)


@pytest.mark.parametrize("policy", ["every", "local:2"])
def test_hooks_of_the_wrapped_optimizer_are_called_once(alone, policy):
    model = small()
    inner = OPTIMIZERS["sgd"](model.parameters())
    called = []
    inner.register_step_pre_hook(lambda *_: called.append("before"))
    inner.register_step_post_hook(lambda *_: called.append("after"))
    inner.register_state_dict_pre_hook(lambda *_: called.append("save"))
    inner.register_load_state_dict_post_hook(lambda *_: called.append("load"))
    optimizer = shared(alone, model, inner, policy)
    train(model, optimizer, steps=1)
    optimizer.load_state_dict(optimizer.state_dict())
    assert called == ["before", "after", "save", "load"]


def test_groups_that_do_not_fit_are_refused_as_by_torch(alone):
    model = small()
    optimizer = shared(alone, model, OPTIMIZERS["sgd"](model.parameters()))
    state = optimizer.state_dict()
    with pytest.raises(ValueError, match="parameter group"):
        optimizer.load_state_dict(state | {"param_groups": state["param_groups"] * 2})
    train(model, optimizer, steps=1)


@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps])
def test_a_copy_is_refused_with_what_to_save(alone, copied):
    model = small()
    optimizer = shared(alone, model, OPTIMIZERS["sgd"](model.parameters()))
    with pytest.raises(UsageError, match="state_dict"):
        copied(optimizer)
