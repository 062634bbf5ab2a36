"""An exchange with one part left out, all workers in one process, on a small training."""

import dataclasses

import pytest
import torch
from torch import nn

from benchmarks.train.ablation import DEFAULT, LOCAL, VARIANTS, WHOLE, Exchange, measure
from benchmarks.train.rates import rate_of
from benchmarks.train.workloads import WORKLOADS


class Small:
    """A line through noise, in place of a workload's net and data."""

    count = 64

    def __init__(self, seed, folder):
        source = torch.Generator().manual_seed(seed)
        self.x = torch.randn(self.count, 40, generator=source)
        self.y = self.x @ torch.randn(40, 20, generator=source)

    def build(self):
        torch.manual_seed(0)
        return nn.Linear(40, 20)

    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), 0.1)

    def loss(self, model, chosen):
        return nn.functional.mse_loss(model(self.x[chosen]), self.y[chosen])

    def score(self, model):
        with torch.no_grad():
            return nn.functional.mse_loss(model(self.x), self.y).item()


SHORT = dataclasses.replace(WORKLOADS["gpt"], steps=8, material=Small)
PLAIN = dataclasses.replace(WHOLE, codec="float32", reply="float32")
PAYLOAD_BYTES = 4 * (40 * 20 + 20) + 4  # values and a header


def train(variant):
    return Exchange(variant, SHORT, 0, None).train()


def test_uncompressed_bytes_are_those_of_the_rounds():
    assert train(PLAIN)[1] == 2 * (2 * 2 * PAYLOAD_BYTES)  # rounds, workers, both ways
    (row,) = measure(SHORT, 1, [dataclasses.replace(PLAIN, h=2)], lambda text: None)
    assert row["fewer_bytes"] == pytest.approx(2.0, rel=0.01)
    assert 3 * train(WHOLE)[1] < train(PLAIN)[1]


def test_a_warm_up_is_exchanged_uncompressed_every_step():
    assert train(dataclasses.replace(WHOLE, warmup=8)) == train(dataclasses.replace(PLAIN, h=1))


def test_uncompressed_every_step_is_one_training_with_the_whole_batch():
    material = Small(0, None)
    model = material.build()
    optimizer = material.optimizer(model)
    for step, chosen in enumerate(torch.from_numpy(SHORT.batches(0, Small.count))):
        optimizer.param_groups[0]["lr"] = SHORT.rate(step, rate_of("shoestring-local", SHORT))
        torch.autograd.backward(material.loss(model, chosen))
        optimizer.step()
        optimizer.zero_grad()
    score, _ = train(dataclasses.replace(PLAIN, h=1))
    assert score == pytest.approx(material.score(model), rel=1e-5)


def test_late_answers_are_those_of_the_rounds_before_what_was_moved_since():
    """One worker's worth: equal batches move both alike, and then it does not matter when answers come."""

    class Alike(Small):
        count = 1

    alike = dataclasses.replace(SHORT, material=Alike)
    want = Exchange(PLAIN, alike, 0, None).train()
    for late in (1, 2, 4):
        score, size = Exchange(dataclasses.replace(PLAIN, late=late), alike, 0, None).train()
        assert (score, size) == (pytest.approx(want[0], rel=1e-5), want[1])


def test_variants_differ_from_the_whole_in_what_they_say():
    assert len({variant.name for variant in VARIANTS}) == len(VARIANTS)
    for first, *others in (VARIANTS, LOCAL):
        assert all(dataclasses.replace(one, name="") != dataclasses.replace(first, name="") for one in others)
    assert (VARIANTS[0], LOCAL[0]) == (WHOLE, DEFAULT)
