"""Gradients that are changed or dropped after they were sent are refused, with the line to write."""

import pytest
import torch
from torch import nn

from shoestring.config import Run
from shoestring.errors import UsageError
from shoestring.observe.events import EventLog
from shoestring.worker.session import Session
from shoestring.worker.wrap import join


@pytest.fixture
def alone():
    here = Session(Run(), "1", EventLog(None, "test"))
    yield here
    here.close()


def wrapped(here: Session, model: nn.Module | None = None):
    torch.manual_seed(0)
    model = model or nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    return join(here, model, optimizer, codec="float32", policy="every")


def backward(model: nn.Module) -> None:
    model(torch.ones(4, 6)).square().mean().backward()


def scale_in_place(parameters) -> None:
    for parameter in parameters:
        parameter.grad.mul_(0.5)


def replace(parameters) -> None:
    for parameter in parameters:
        parameter.grad = parameter.grad * 0.5


def scale_past_versions(parameters) -> None:
    for parameter in parameters:
        parameter.grad.data.mul_(0.5)


def clip_value(parameters) -> None:
    nn.utils.clip_grad_value_(parameters, 1e-6)


def clip_norm(parameters) -> None:
    nn.utils.clip_grad_norm_(parameters, 1e-6)


@pytest.mark.parametrize("change", [clip_norm, clip_value, scale_in_place, replace, scale_past_versions])
def test_a_gradient_that_was_changed_after_it_was_sent_is_refused(alone, change):
    model, optimizer = wrapped(alone)
    backward(model)
    change(list(model.parameters()))
    with pytest.raises(UsageError, match="changed after it was sent") as caught:
        optimizer.step()
    assert "wrap(model)" in caught.value.hint
    assert "clip_norm=" in caught.value.hint


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_that_are_dropped_for_another_pass_are_refused_as_such(alone, set_to_none):
    model, optimizer = wrapped(alone)
    backward(model)
    optimizer.zero_grad(set_to_none=set_to_none)  # and `continue`
    with pytest.raises(UsageError, match="dropped without `optimizer.step\\(\\)`") as caught:
        backward(model)
    assert "wrap(model)" in caught.value.hint


def test_gradients_that_are_dropped_before_the_step_are_refused(alone):
    model, optimizer = wrapped(alone)
    backward(model)
    optimizer.zero_grad()
    with pytest.raises(UsageError, match="dropped"):
        optimizer.step()


def test_a_second_pass_is_not_taken_for_a_dropped_one(alone):
    model, _ = wrapped(alone)
    backward(model)
    with pytest.raises(UsageError, match="second backward pass") as caught:
        backward(model)
    assert "no_sync" in caught.value.hint


class TwoHalves(nn.Module):
    """Both weights are in one part, and a pass uses one of them or both."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, *, whole: bool) -> torch.Tensor:
        return self.first(x) + self.second(x) if whole else self.second(x)


def test_a_pass_may_be_dropped_of_which_nothing_was_sent(alone):
    plain = TwoHalves()
    model = TwoHalves()
    model.load_state_dict(plain.state_dict())
    model, optimizer = wrapped(alone, model)
    own = torch.optim.SGD(plain.parameters(), 0.1, momentum=0.9)
    for net, steps in ((model, optimizer), (plain, own)):
        for is_dropped in (True, False, True, True, False):
            net(torch.ones(4, 6), whole=not is_dropped).square().mean().backward()
            if not is_dropped:
                steps.step()
            steps.zero_grad()
    for own_value, want in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own_value, want, rtol=1e-6, atol=1e-6)


def test_rates_that_change_after_gradients_were_sent_are_refused(alone):
    model, optimizer = wrapped(alone)
    backward(model)
    optimizer.param_groups[0]["lr"] = 0.05
    with pytest.raises(UsageError, match="learning rate"):
        optimizer.step()


def test_gradients_without_a_backward_pass_are_taken_as_they_are(alone):
    model, optimizer = wrapped(alone)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
        parameter.grad.mul_(0.5)
    optimizer.step()
    for parameter, old in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(parameter, old - 0.05)
