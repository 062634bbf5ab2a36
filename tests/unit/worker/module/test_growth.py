"""Parameters that are trained later than the others, with the update on the shards."""

import pytest
import torch
from torch import Tensor, nn

from shoestring.errors import UsageError
from shoestring.worker.session import Session
from shoestring.worker.wrap import join
from tests.unit.worker.cluster import Cluster

STEPS = 6


def make() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.arange(parameter.numel()).view(parameter.shape) % 7 / 8 - index / 8)
    model[0].requires_grad_(False)
    return model


def batch(worker: int, step: int) -> Tensor:
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(10 * step + worker))


def unfreeze(model: nn.Module, optimizer: torch.optim.Optimizer, *, is_added: bool) -> None:
    model[0].requires_grad_(True)
    if is_added:
        optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.02})


def made(model: nn.Module, *, is_added: bool) -> torch.optim.Optimizer:
    return torch.optim.AdamW((model[1] if is_added else model).parameters(), 0.05)


@pytest.mark.parametrize("is_added", [False, True])
def test_they_are_updated_as_a_plain_optimizer_would(is_added: bool):
    def be_worker(here: Session) -> tuple[list[Tensor], dict]:
        model = make()
        model, optimizer = join(here, model, made(model, is_added=is_added), codec="float32")
        for step in range(STEPS):
            if step == 2:
                unfreeze(model, optimizer, is_added=is_added)
            model(batch(here.run.worker, step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters()], optimizer.state_dict()

    with Cluster(2, 2) as cluster:
        (first, state), (second, _) = cluster.train(be_worker)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))

    plain = make()
    optimizer = made(plain, is_added=is_added)
    for step in range(STEPS):
        if step == 2:
            unfreeze(plain, optimizer, is_added=is_added)
        sum(plain(batch(worker, step)).square().mean() for worker in range(2)).div(2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for got, want in zip(first, plain.parameters(), strict=True):
        # Adam moves a value by about its rate a step, whatever the gradient: rounding stays far below.
        torch.testing.assert_close(got, want.detach(), atol=1e-5, rtol=1e-5)
    want_state = optimizer.state_dict()
    assert state["param_groups"] == want_state["param_groups"]
    steps = {index: entry["step"].item() for index, entry in state["state"].items()}
    assert steps == {index: entry["step"].item() for index, entry in want_state["state"].items()}


@pytest.mark.parametrize("settings", [{"clip_norm": 1.0}, {"policy": "local:2"}])
def test_where_they_cannot_be_taken_in_they_are_named(settings: dict):
    with Cluster(1, 1) as cluster, cluster.session(0) as here:
        model = make()
        model, optimizer = join(here, model, made(model, is_added=False), codec="float32", **settings)
        unfreeze(model, optimizer, is_added=False)
        with pytest.raises(UsageError, match=r"`0.weight`, `0.bias` \(2 in all\) are trained from now on"):
            model(batch(0, 0))


def test_parameters_of_another_model_are_refused():
    with Cluster(1, 1) as cluster, cluster.session(0) as here:
        model = make()
        model, optimizer = join(here, model, made(model, is_added=False), codec="float32")
        optimizer.add_param_group({"params": list(nn.Linear(2, 2).parameters())})
        with pytest.raises(UsageError, match="the wrapped model has not"):
            model(batch(0, 0))
