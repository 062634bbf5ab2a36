"""A run that stops and is resumed ends with the bits of one that never stopped."""

import random
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from shoestring.checkpoint.snapshot import newest
from shoestring.worker.data.batches import Batches
from shoestring.worker.randomness import restore_random
from shoestring.worker.session import Session
from shoestring.worker.wrap import join
from tests.unit.worker.cluster import Cluster

EVERY = 7
STEPS = 33  # over three epochs of 12 batches
_turn = threading.Lock()  # torch has one random state for all threads: one worker at a time draws from it


class StoppedError(Exception):
    """The end of a run that did not reach its end."""


def train(here: Session, codec: str, policy: str, stop_after: int | None) -> tuple[str, list[float]]:
    source = torch.Generator().manual_seed(5)
    dataset = TensorDataset(
        torch.randn(96, 6, generator=source), torch.randint(0, 3, (96,), generator=source)
    )
    with _turn:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 40), nn.BatchNorm1d(40), nn.ReLU(), nn.Linear(40, 3))
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    model, optimizer = join(here, model, optimizer, codec=codec, policy=policy)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
    here.stateful.append(scheduler)
    if here.resumed.stateful:
        scheduler.load_state_dict(here.resumed.stateful[0])
    loader = DataLoader(dataset, batch_sampler=Batches(here, len(dataset), 4, shuffle=True, seed=9))
    losses: list[float] = []
    while True:
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            losses.append(loss.item())
            if optimizer.steps == STEPS:
                return optimizer.parameter_hash() + str(model[1].running_mean.sum().item()), losses
            if stop_after is not None and optimizer.steps == stop_after:
                raise StoppedError


def run(folder: Path, shards: int, codec: str, policy: str, **settings) -> list[tuple[str, list[float]]]:
    stop_after = settings.pop("stop_after", None)
    with Cluster(2, shards, checkpoint=folder, every=EVERY, **settings) as cluster:
        return cluster.train(lambda here: train(here, codec, policy, stop_after))


@pytest.mark.parametrize(
    ("codec", "policy"),
    [
        ("float32", "every"),
        ("dct", "every"),
        ("dct", "every:delay=1"),
        ("dct", "local:3"),
        ("dct", "local:3,delay=2"),
        ("dct:bits=1", "every"),
    ],
)
@pytest.mark.parametrize("shards", [1, 3])
def test_resume_on_another_number_of_shards_ends_with_the_same_bits(
    tmp_path: Path, codec: str, policy: str, shards: int
) -> None:
    whole = run(tmp_path / "whole", 2, codec, policy)
    with pytest.raises(StoppedError):
        run(tmp_path / "cut", 2, codec, policy, stop_after=25)
    found, passed_over = newest(tmp_path / "cut")
    assert found is not None
    assert not passed_over
    resumed = run(tmp_path / "cut", shards, codec, policy, resume=found.folder)
    assert [digest for digest, _ in resumed] == [digest for digest, _ in whole]
    for (_, own), (_, want) in zip(resumed, whole, strict=True):
        assert own == want[-len(own) :]
        assert len(own) < STEPS


def test_random_states_come_back(tmp_path: Path) -> None:
    def be_worker(here: Session) -> list[float]:
        model = nn.Linear(4, 2)
        model, optimizer = join(
            here, model, torch.optim.SGD(model.parameters(), 0.1), codec="float32", policy="every"
        )
        for step in range(3):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 1:
                return [random.random(), float(np.random.random()), float(torch.rand(()))]
        return []

    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    with Cluster(1, 1, checkpoint=tmp_path, every=2) as cluster:
        drawn = cluster.train(be_worker)[0]
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    found, _ = newest(tmp_path)

    def resume(here: Session) -> list[float]:
        model = nn.Linear(4, 2)
        join(here, model, torch.optim.SGD(model.parameters(), 0.1), codec="float32", policy="every")
        restore_random(here)
        return [random.random(), float(np.random.random()), float(torch.rand(()))]

    with Cluster(1, 1, resume=found.folder) as cluster:
        assert cluster.train(resume)[0] == drawn
