"""Workers find out that they train on the same batches, or hold different parameters."""

import pytest
import torch
from torch import nn

from shoestring.errors import ShoestringError
from shoestring.worker.rounds.witness import EVERY
from shoestring.worker.session import Session
from shoestring.worker.wrap import join
from tests.unit.worker.cluster import Cluster


def notices(seeds: tuple[int, ...], steps: int = 5, with_optimizer: bool = False) -> list[str]:
    """What the first worker says when the workers' batches come from these seeds."""

    def be_worker(here: Session) -> list[str]:
        said: list[str] = []
        here.notice = said.append
        model = nn.Linear(3, 2)
        if with_optimizer:
            model, optimizer = join(here, model, torch.optim.SGD(model.parameters(), 0.1), codec="float32")
        else:
            model = join(here, model, codec="float32")
        source = torch.Generator().manual_seed(seeds[here.run.worker])
        for _ in range(steps):
            model(torch.randn(4, 3, generator=source)).sum().backward()
            if with_optimizer:
                optimizer.step()
                optimizer.zero_grad()
        return said

    with Cluster(len(seeds), 1) as cluster:
        return cluster.train(be_worker)[0]


@pytest.mark.parametrize("with_optimizer", [False, True])
def test_equal_batches_are_said_once_with_the_line_to_write(with_optimizer):
    (said,) = notices((1, 2, 1), with_optimizer=with_optimizer)
    assert "workers 0 and 2" in said
    assert "shoestring.split(loader)" in said


def test_different_batches_are_nothing_to_speak_of():
    assert notices((1, 2, 3)) == []


def test_parameters_that_went_apart_end_the_run_with_their_name():
    def be_worker(here: Session) -> None:
        model = join(here, nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)), codec="float32")
        optimizer = torch.optim.SGD(model.parameters(), 0.1 if here.run.worker == 0 else 0.2)
        for _ in range(EVERY + 1):
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    with (
        Cluster(2, 1) as cluster,
        pytest.raises(ShoestringError, match=r"workers 0 and 1 hold different values of `0\.bias`"),
    ):
        cluster.train(be_worker)
