"""Local steps: after a round all workers hold the same, then each goes on with what it has not sent."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from shoestring.errors import UsageError
from shoestring.worker.rounds.policy import LocalSteps
from shoestring.worker.session import Session
from shoestring.worker.wrap import join
from tests.unit.worker.cluster import Cluster

H, ROUNDS = 3, 4


def build() -> nn.Module:
    source = torch.Generator().manual_seed(1)
    model = nn.Linear(24, 24)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=source))
    return model


def flat(model: nn.Module) -> np.ndarray:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]).numpy().copy()


def train(here: Session, codec: str) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """After each round: the parameters, what is kept of them, and the parameters once it went on."""
    model = build()
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    model, shared = join(here, model, sgd, codec=codec, policy=LocalSteps(H))
    coder = shared.driver.coder
    source = torch.Generator().manual_seed(2 + here.run.worker)
    seen = []
    for step in range(1, H * ROUNDS + 1):
        model(torch.randn(8, 24, generator=source)).square().mean().backward()
        shared.step()
        shared.zero_grad()
        if step % H == 0:
            kept = coder.state().get("kept.00000", np.zeros(600, np.float32))
            agreed = flat(model)
            with torch.no_grad():
                model(torch.zeros(1, 24))  # an evaluation changes nothing
            np.testing.assert_array_equal(flat(model), agreed)
            model(torch.zeros(1, 24))
            seen.append((agreed, kept, flat(model)))
    return seen


def test_workers_agree_after_a_round_and_go_on_with_what_they_kept():
    with Cluster(2, 1) as cluster:
        first, second = cluster.train(lambda here: train(here, "dct:step=4,small=0"))
    for (agreed, kept, gone_on), (other, other_kept, _) in zip(first, second, strict=True):
        np.testing.assert_array_equal(agreed, other)
        assert kept.any()
        assert (kept != other_kept).any()
        np.testing.assert_array_equal(gone_on, agreed + kept)


@pytest.mark.parametrize("keep", [True, False, None])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_what_a_codec_leaves_out_is_kept_or_not_on_both_sides(kind, keep):
    def be_worker(here: Session) -> tuple[bool, np.ndarray, np.ndarray]:
        model = build()
        policy = LocalSteps(H, keep=keep)
        model, shared = join(
            here, model, kind(model.parameters(), 0.1), codec="dct:step=4,small=0", policy=policy
        )
        source = torch.Generator().manual_seed(2 + here.run.worker)
        for _ in range(H * ROUNDS):
            model(torch.randn(8, 24, generator=source)).square().mean().backward()
            shared.step()
        agreed = flat(model)
        model(torch.zeros(1, 24))
        return "kept.00000" in shared.driver.coder.state(), agreed, flat(model)

    with Cluster(2, 1) as cluster:
        first, second = cluster.train(be_worker)
        (shard,) = cluster.shards
    keeps = kind is torch.optim.SGD if keep is None else keep
    np.testing.assert_array_equal(first[1], second[1])
    assert (first[0], (first[1] != first[2]).any()) == (keeps, keeps)
    assert all((rounds.holding.feedback is not None) == keeps for rounds in shard.parts.values())


def test_with_a_lossless_codec_there_is_nothing_to_go_on_with():
    with Cluster(2, 1) as cluster:
        first, _ = cluster.train(lambda here: train(here, "float32"))
    for agreed, _, gone_on in first:
        np.testing.assert_array_equal(gone_on, agreed)


def descend(kind, here: Session | None, groups) -> np.ndarray:
    """Steps that an optimizer takes with a closure, alone or as a worker; every worker has the same data."""
    model = build()
    optimizer = kind(groups(model))
    if here is not None:
        model, optimizer = join(here, model, optimizer, codec="float32", policy=LocalSteps(H))
    x = torch.randn(8, 24, generator=torch.Generator().manual_seed(2))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(H * ROUNDS)]
    assert losses[-1] < losses[0]
    return flat(model)


@pytest.mark.parametrize(
    "kind",
    [partial(torch.optim.SGD, lr=0.1, momentum=0.9), partial(torch.optim.LBFGS, lr=0.1, max_iter=3)],
)
def test_the_closure_is_the_optimizers(kind):
    want = descend(kind, None, nn.Module.parameters)
    with Cluster(2, 1) as cluster:
        for found in cluster.train(lambda here: descend(kind, here, nn.Module.parameters)):
            np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("outer", ["average", "nesterov"])
def test_groups_have_rates_of_their_own(outer):
    def groups(model: nn.Module) -> list[dict]:
        return [{"params": [model.weight], "lr": 0.3}, {"params": [model.bias]}]

    def train_groups(here: Session) -> np.ndarray:
        model = build()
        sgd = torch.optim.SGD(groups(model), 0.01)
        policy = LocalSteps(H, outer=outer, lr=1.0, momentum=0.0)
        model, shared = join(here, model, sgd, codec="float32", policy=policy)
        for _ in range(H * ROUNDS):
            model(torch.ones(1, 24)).square().mean().backward()
            shared.step()
            shared.zero_grad()
        return flat(model)

    plain = build()
    own = torch.optim.SGD(groups(plain), 0.01)
    for _ in range(H * ROUNDS):
        plain(torch.ones(1, 24)).square().mean().backward()
        own.step()
        own.zero_grad()
    with Cluster(2, 1) as cluster:
        for found in cluster.train(train_groups):
            np.testing.assert_allclose(found, flat(plain), rtol=1e-5, atol=1e-6)


def batch(worker: int, step: int) -> torch.Tensor:
    return torch.randn(8, 24, generator=torch.Generator().manual_seed(100 * worker + step))


def halve(model: nn.Module) -> None:
    with torch.no_grad():
        model.get_parameter("weight").mul_(0.5)


def train_late(here: Session, delay: int, sets: int, after: Callable[[Any, int], None]) -> np.ndarray:
    """Local steps whose answers are applied late."""
    model = build()
    sgd = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model, shared = join(here, model, sgd, codec="float32", policy=LocalSteps(H, delay=delay))
    for step in range(H * ROUNDS + delay):
        if sets and step == sets:
            halve(model)
        model(batch(here.run.worker, step)).square().mean().backward()
        shared.step()
        shared.zero_grad()
        after(shared, step)
    return flat(model)


@pytest.mark.parametrize("delay", range(H + 1))
@pytest.mark.parametrize(  # the script halves the weight before this step
    ("sets", "looks"), [(0, False), (0, True), (H, False), (H + 1, True)]
)
def test_late_answers_are_applied_as_by_hand(delay, sets, looks):
    models = [build(), build()]
    optimizers = [torch.optim.SGD(model.parameters(), 0.1, momentum=0.9) for model in models]
    anchor = torch.from_numpy(flat(models[0]))
    then = []
    agreed = []

    def write(model: nn.Module, values: torch.Tensor) -> None:
        torch.nn.utils.vector_to_parameters(values.clone(), model.parameters())

    for step in range(1, H * ROUNDS + delay + 1):
        if sets and step == sets + 1:
            for model in models:
                halve(model)
            if then:  # the answer under way is for what was there before
                first, second = (values - anchor for values in then)
                anchor, then = anchor + (first + second) * 0.5, []
        for worker, (model, sgd) in enumerate(zip(models, optimizers, strict=True)):
            model(batch(worker, step - 1)).square().mean().backward()
            sgd.step()
            sgd.zero_grad()
        if then and (step - delay) % H == 0:
            first, second = (values - anchor for values in then)
            anchor = anchor + (first + second) * 0.5
            for model, values in zip(models, then, strict=True):
                write(model, (torch.from_numpy(flat(model)) - values) + anchor)
            then = []
        if step % H == 0:
            then = [torch.from_numpy(flat(model)) for model in models]
            if delay == 0:
                first, second = (values - anchor for values in then)
                anchor = anchor + (first + second) * 0.5
                for model in models:
                    write(model, anchor)
                then = []
        agreed.append(anchor.numpy())
    if then:
        first, second = (values - anchor for values in then)
        agreed.append((anchor + (first + second) * 0.5).numpy())

    def look(shared: Any, step: int) -> None:
        with shared.agreed():
            seen = np.concatenate([p.detach().numpy().ravel() for p in shared.param_groups[0]["params"]])
        due = agreed[step : step + delay + 1]  # it waits for what is under way
        assert any((values == seen).all() for values in due)

    with Cluster(2, 1) as cluster:
        found = cluster.train(
            lambda here: train_late(here, delay, sets, look if looks else lambda shared, step: None)
        )
    for model, values in zip(models, found, strict=True):
        np.testing.assert_array_equal(values, flat(model))


def test_what_must_not_be_done_with_what_was_agreed_on_is_refused():
    def change(shared: Any) -> None:
        with torch.no_grad():
            shared.param_groups[0]["params"][0].zero_()

    def be_worker(here: Session) -> list[str]:
        said = []
        model = build()
        policy = LocalSteps(2, delay=1)
        sgd = torch.optim.SGD(model.parameters(), 0.1)
        model, shared = join(here, model, sgd, codec="float32", policy=policy)
        for _ in range(2):
            model(batch(0, 0)).square().mean().backward()
            shared.step()
        before = flat(model)
        with pytest.raises(UsageError) as caught, shared.agreed():
            shared.step()
        said.append(caught.value.message)
        with pytest.raises(UsageError) as caught, shared.agreed():
            change(shared)
        said.append(caught.value.message)
        np.testing.assert_array_equal(flat(model), before)
        return said

    with Cluster(1, 1) as cluster:
        (said,) = cluster.train(be_worker)
    for message, what in zip(said, ("a step within", "changed within"), strict=True):
        assert what in message
