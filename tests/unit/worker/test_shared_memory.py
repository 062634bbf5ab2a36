"""Values handed over in memory are the values that would have crossed a socket."""

from pathlib import Path

import pytest
import torch
from torch import nn

from shoestring.wire.shared import FOLDER
from shoestring.worker.session import Session
from shoestring.worker.wrap import join
from tests.unit.worker.cluster import Cluster


def train(here: Session, policy: str) -> tuple[str, bool]:
    model = nn.Linear(64, 700)
    model.weight.data.uniform_(-1, 1, generator=torch.Generator().manual_seed(1))
    model.bias.data.zero_()
    model, optimizer = join(
        here, model, torch.optim.SGD(model.parameters(), 0.01, momentum=0.9), codec="float32", policy=policy
    )
    for step in range(12):
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(10 * step + here.run.worker))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer.parameter_hash(), optimizer.driver.coder.exchange.free_slot(0) is not None


@pytest.mark.alone  # other tests share memory, too
@pytest.mark.parametrize("policy", ["every", "every:delay=1", "local:2", "local:3,outer=nesterov"])
def test_the_bits_are_those_of_sockets_and_no_file_is_left(policy: str) -> None:
    before = set(Path(FOLDER).glob("shoestring-*"))
    with Cluster(2, 2) as cluster:
        plain = cluster.train(lambda here: train(here, policy))
    with Cluster(2, 2, ipc=True) as cluster:
        shared = cluster.train(lambda here: train(here, policy))
    assert [digest for digest, _ in shared] == [digest for digest, _ in plain]
    assert [is_shared for _, is_shared in shared] == [True, True]
    assert [is_shared for _, is_shared in plain] == [False, False]
    assert set(Path(FOLDER).glob("shoestring-*")) == before
