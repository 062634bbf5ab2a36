"""A global batch in unequal shares: the same samples, the same mean, whoever takes them."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from shoestring.config import Run
from shoestring.errors import UsageError, WireError
from shoestring.observe.events import EventLog
from shoestring.wire.messages import Shares
from shoestring.worker.data.batches import Batches
from shoestring.worker.rounds.sharing import NOTICE, WINDOW, Sharing
from shoestring.worker.session import Session
from shoestring.worker.wrap import join
from tests.unit.worker.cluster import Cluster

STEPS, GLOBAL = 12, 24


def make_data() -> TensorDataset:
    source = torch.Generator().manual_seed(3)
    return TensorDataset(
        torch.randn(STEPS * GLOBAL, 6, generator=source), torch.randn(STEPS * GLOBAL, 2, generator=source)
    )


def make_model() -> nn.Module:
    source = torch.Generator().manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 30), nn.Tanh(), nn.Linear(30, 2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=source) * 0.3)
    return model


def train(here: Session, shares, codec="float32", policy="every:delay=0", decisions=()) -> tuple:
    data, model = make_data(), make_model()
    model, optimizer = join(
        here, model, torch.optim.SGD(model.parameters(), 0.05), codec=codec, policy=policy
    )
    sampler = Batches(here, len(data), 0, shuffle=True, seed=4, global_batch=GLOBAL, shares=shares)
    for decision in decisions:
        here.sharing.obey(decision)
    sizes = []
    for x, y in DataLoader(data, batch_sampler=sampler):
        sizes.append(len(x))
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    flat = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    return sizes, flat.numpy().astype(np.float64), optimizer.parameter_hash()


def run(workers, shares, **settings):
    with Cluster(workers, 2) as cluster:
        return cluster.train(lambda here: train(here, shares, **settings))


def whole_batch() -> np.ndarray:
    """The same steps, each on its whole global batch, in float64."""
    data, model = make_data(), make_model().double()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    here = Session(Run(), "1", EventLog(None, "test"))
    for indices in Batches(here, len(data), 0, shuffle=True, seed=4, global_batch=GLOBAL):
        x, y = (tensor.double() for tensor in data[indices])
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]).numpy()


@pytest.mark.parametrize(
    ("workers", "shares", "sizes"),
    [(2, None, (12, 12)), (2, (1, 3), (6, 18)), (3, (1, 2, 3), (4, 8, 12)), (2, (1, 23), (1, 23))],
)
def test_any_shares_give_the_mean_over_the_global_batch(workers, shares, sizes):
    results = run(workers, shares)
    assert [set(sizes) for sizes, *_ in results] == [{size} for size in sizes]
    assert len({digest for *_, digest in results}) == 1
    # Each step rounds sums of up to 24 float32 products to half a unit in the last place, and scales them
    # by a learning rate below 1; values and gradients here are below 4.
    bound = STEPS * 64 * 4 * np.finfo(np.float32).eps
    assert np.abs(results[0][1] - whole_batch()).max() < bound


def test_what_was_kept_counts_as_it_would_have_counted():
    """Lossy, with shares that change on the way: still one set of parameters on all workers."""
    decisions = (Shares(5, (18, 6)), Shares(9, (3, 21)))
    results = run(2, (1, 1), codec="int8", decisions=decisions)
    assert results[0][0] == [12] * 4 + [18] * 4 + [3] * 4
    assert len({digest for *_, digest in results}) == 1
    # int8 with feedback stays close to the exact mean only if what is kept is weighed rightly.
    assert np.abs(results[0][1] - whole_batch()).max() < 0.01


def sharing(workers=2, worker=0) -> Sharing:
    made = Sharing(worker, workers, lambda: 0)
    made.is_auto = True
    made.begin(32, None)
    return made


def test_samples_move_from_the_slow_to_the_fast_with_notice():
    first, other = sharing(), sharing(worker=1)
    for step in range(1, WINDOW + 1):
        first.step = other.step = step
        first.hear([0.3, 0.1])
        decision = first.decide()
    assert decision == Shares(WINDOW + NOTICE, (8, 24))
    for one in (first, other):
        one.obey(decision)
        assert one.fetch() == (16, 16)
        one.step = WINDOW + NOTICE - 1 - 1
        assert one.fetch() == (8, 24)  # one batch is fetched and not trained on: this is for the step after


def test_equal_and_noisy_speeds_change_nothing():
    here = sharing()
    for step in range(1, 10 * WINDOW):
        here.step = step
        here.hear([0.100 + 0.002 * (step % 2), 0.101])
        assert here.decide() is None


def test_nothing_is_decided_while_a_change_is_on_its_way():
    here = sharing()
    for step in range(1, WINDOW + 1):
        here.step = step
        here.hear([0.3, 0.1])
    here.obey(here.decide())
    for step in range(WINDOW + 1, 2 * WINDOW + NOTICE):
        here.step = step
        here.hear([0.3, 0.1])
        assert here.decide() is None


def test_incomplete_rounds_are_not_looked_at():
    here = sharing(3)
    for step in range(1, 3 * WINDOW):
        here.step = step
        here.hear([0.3, 0.1] if step % 2 else [0.3, 0.0, 0.1])
        assert here.decide() is None


def test_shares_are_restored_from_a_checkpoint():
    here = sharing()
    here.obey(Shares(7, (10, 22)))
    again = Sharing(0, 2, lambda: 0)
    again.load(here.state())
    again.begin(32, None)
    again.step = 8
    assert again.fetch() == (10, 22)
    other = Sharing(0, 2, lambda: 0)
    other.load(here.state())
    other.begin(64, None)  # another global batch: its own shares
    assert other.fetch() == (32, 32)


@pytest.mark.parametrize(
    ("total", "shares", "text"),
    [
        (8, (1, 2, 3), "shares"),
        (8, (1, 0), "shares"),
        (8, (1, float("nan")), "shares"),
        (1, None, "global batch"),
    ],
)
def test_shares_that_cannot_be_are_refused(total, shares, text):
    with pytest.raises(UsageError, match=text):
        Sharing(0, 2, lambda: 0).begin(total, shares)


@pytest.mark.parametrize("samples", [(10, 21), (32,), (16, 8, 8)])
def test_shares_that_do_not_fit_are_refused(samples):
    with pytest.raises(WireError, match="global batch of 32 among 2 workers"):
        sharing().obey(Shares(7, samples))
