"""A gradient that is not finite skips the whole step: all parts of it, on all workers."""

import threading

import numpy as np
import pytest
import torch
from torch import nn

from shoestring.worker.session import Session
from shoestring.worker.wrap import join
from tests.unit.worker.cluster import Cluster

BAD_STEP = 2
_seeding = threading.Lock()  # workers are threads here, and torch has one seed for all


def deep() -> nn.Sequential:
    """Several parts; the last layer's gradients are sent before the first one's are known."""
    with _seeding:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(200, 200) for _ in range(6)))


class Poison(torch.autograd.Function):
    """Hands its input on; on the way back the gradient becomes infinite in front of it."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * float("inf")


def loss_of(model: nn.Sequential, step: int, worker: int, *, is_bad: bool) -> torch.Tensor:
    x = torch.randn(4, 200, generator=torch.Generator().manual_seed(10 * step + worker))
    for place, layer in enumerate(model):
        x = layer(x)
        if is_bad and place == 1:
            x = Poison.apply(x)  # layers 0 and 1 overflow, 2 to 5 do not
    return x.square().mean()


def train(here: Session, codec: str, policy: str, bad_worker: int, **settings) -> list[str]:
    model = deep()
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    model, optimizer = join(here, model, optimizer, codec=codec, policy=policy, **settings)
    hashes = []
    for step in range(5):
        is_bad = step == BAD_STEP and here.run.worker == bad_worker
        loss_of(model, step, here.run.worker, is_bad=is_bad).backward()
        optimizer.step()
        optimizer.zero_grad()
        hashes.append(optimizer.parameter_hash())
    driver = optimizer.driver
    if driver._answered < driver.steps:  # the last push is applied, too, before anybody looks
        driver.coder.collect(driver.steps, driver.replica, is_whole=False)
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
    return hashes


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("codec", ["float32", "dct"])
@pytest.mark.parametrize("clip_norm", [0.0, 1.0])
@pytest.mark.parametrize("bad_worker", [0, 1])
def test_one_workers_overflow_skips_the_step_whole(shards, codec, clip_norm, bad_worker):
    with Cluster(2, shards) as cluster:
        first, second = cluster.train(
            lambda here: train(here, codec, "every", bad_worker, clip_norm=clip_norm)
        )
        counts = {
            count
            for shard in cluster.shards
            for rounds in shard.parts.values()
            for count in rounds.holding.steps.tolist()
        }
    assert first == second
    assert first[BAD_STEP] == first[BAD_STEP - 1]
    assert len(set(first)) == 4
    assert counts == {4}


def test_a_skipped_step_leaves_the_run_as_if_it_had_not_been():
    def be_worker(here: Session) -> str:
        return train(here, "float32", "every", bad_worker=1)[-1]

    def without(here: Session) -> str:
        model = deep()
        optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
        model, optimizer = join(here, model, optimizer, codec="float32", policy="every")
        for step in (0, 1, 3, 4):
            loss_of(model, step, here.run.worker, is_bad=False).backward()
            optimizer.step()
            optimizer.zero_grad()
        return optimizer.parameter_hash()

    with Cluster(2, 2) as cluster:
        hashes = cluster.train(be_worker)
    with Cluster(2, 2) as cluster:
        assert cluster.train(without) == hashes


@pytest.mark.parametrize("policy", ["every:delay=1", "bounded:2", "async"])
def test_other_policies_skip_it_whole(policy):
    with Cluster(2, 2) as cluster:
        cluster.train(lambda here: train(here, "dct", policy, 1))
        counts = {
            count
            for shard in cluster.shards
            for rounds in shard.parts.values()
            for count in rounds.holding.steps.tolist()
        }
    assert counts == ({4} if policy.startswith("every") else {9})


def test_local_steps_skip_a_round_whole_and_go_on_from_what_all_agreed_on():
    def be_worker(here: Session) -> tuple[list[str], bool]:
        model = deep()
        optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
        model, optimizer = join(here, model, optimizer, codec="dct", policy="local:2")
        hashes = []
        for step in range(6):
            loss_of(model, step, here.run.worker, is_bad=False).backward()
            if step == 3 and here.run.worker == 1:
                optimizer.inner.state.clear()
                next(model[0].parameters()).grad.fill_(float("nan"))
            optimizer.step()
            optimizer.zero_grad()
            hashes.append(optimizer.parameter_hash())
            if step == 3:
                optimizer.inner.state.clear()
        return hashes[1::2], all(np.isfinite(p.detach().numpy()).all() for p in model.parameters())

    with Cluster(2, 2) as cluster:
        (first, is_finite), (second, is_finite_too) = cluster.train(be_worker)
        counts = {
            count
            for shard in cluster.shards
            for rounds in shard.parts.values()
            for count in rounds.holding.steps.tolist()
        }
    assert first == second
    assert first[0] == first[1] != first[2]
    assert is_finite
    assert is_finite_too
    assert counts == {2}


def test_parameters_that_came_later_skip_together_with_the_others():
    def be_worker(here: Session) -> list[str]:
        model = deep()
        model[0].requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
        model, optimizer = join(here, model, optimizer, codec="float32", policy="every")
        hashes = []
        for step in range(5):
            if step == 1:
                model[0].requires_grad_(True)
            loss = loss_of(model, step, here.run.worker, is_bad=False)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == BAD_STEP and here.run.worker:
                handle = model[0].weight.register_hook(lambda gradient: gradient * float("nan"))
            elif step == BAD_STEP + 1 and here.run.worker:
                handle.remove()
            hashes.append(optimizer.parameter_hash())
        return hashes

    with Cluster(2, 2) as cluster:
        first, second = cluster.train(be_worker)
    assert first == second
    assert first[BAD_STEP] == first[BAD_STEP + 1]
    assert len(set(first)) == 4
