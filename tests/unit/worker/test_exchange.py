"""A worker's exchange over real sockets, when messages are lost or shards refuse it."""

import pytest
import torch

from shoestring.errors import ShoestringError
from shoestring.wire import messages as say
from shoestring.wire.identity import identity_of
from shoestring.worker.wrap import join
from tests.unit.worker.cluster import Cluster


def joined(here, codec="float32"):
    model = torch.nn.Linear(3, 2)
    return join(here, model, torch.optim.SGD(model.parameters(), 0.1), codec=codec, policy=None)[1]


def test_a_beat_that_measures_a_link_is_sent_again_when_it_is_lost(monkeypatch):
    monkeypatch.setattr("shoestring.worker.exchange.BEAT_S", 0.02)
    with Cluster(1, 1) as cluster:
        (shard,) = cluster.shards
        handle, lost = shard.handle, []

        def lose_one(sender, message, payload, now):
            if isinstance(message, say.Beat) and payload.nbytes and not lost:
                lost.append(message)
            else:
                handle(sender, message, payload, now)

        shard.handle = lose_one
        with cluster.session(0) as here:
            exchange = joined(here, codec="auto").driver.coder.exchange
            assert len(lost) == 1
            assert 0 < exchange.rates()[0] < float("inf")


def test_reports_are_not_waited_for_once_the_exchange_has_failed():
    with Cluster(1, 1) as cluster, cluster.session(0) as here:
        exchange = joined(here).driver.coder.exchange
        exchange.wait_report(0.01)
        cluster.shards[0].refuse(identity_of(0, here.life, 0), ShoestringError("broken", hint="start again"))
        with pytest.raises(ShoestringError, match="broken"):
            wait_long(exchange)


def test_a_step_after_the_worker_has_left_is_refused():
    with Cluster(1, 1) as cluster, cluster.session(0) as here:
        optimizer = joined(here)
        here.close()
        optimizer.inner.param_groups[0]["params"][0].grad = torch.ones(2, 3)
        with pytest.raises(ShoestringError, match="has left its run"):
            optimizer.step()


def wait_long(exchange) -> None:
    for _ in range(3000):
        exchange.wait_report(0.01)
