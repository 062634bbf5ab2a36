"""The same training for all contestants."""

import numpy as np
import pytest
import torch

from benchmarks.train.workloads import WORKLOADS, find_workload
from shoestring.errors import UsageError


def test_every_sample_comes_once_before_any_comes_twice():
    workload = WORKLOADS["conv"]
    count = workload.steps * workload.batch // 3
    order = workload.batches(5, count).ravel()
    for start in range(0, 3 * count, count):
        assert sorted(order[start : start + count]) == list(range(count))


def test_batches_follow_the_seed_alone():
    workload = WORKLOADS["gpt"]
    np.testing.assert_array_equal(workload.batches(1, 10_000), workload.batches(1, 10_000))
    assert (workload.batches(1, 10_000) != workload.batches(2, 10_000)).any()


def test_the_rate_rises_to_its_height_and_falls_to_nothing():
    workload = WORKLOADS["conv"]
    rates = [workload.rate(step, 0.1) for step in range(workload.steps)]
    assert rates[0] == pytest.approx(0.1 / workload.warmup, rel=1e-3)
    assert max(rates) == rates[workload.warmup - 1] <= 0.1
    assert rates[-1] < 1e-5


@pytest.mark.parametrize("name", WORKLOADS)
def test_all_contestants_start_from_the_same_parameters(name):
    one, two = (find_workload(name).material(3, None).build() for _ in range(2))
    for own, others in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(own, others)


@pytest.mark.parametrize("name", WORKLOADS)
def test_hosts_share_out_a_global_batch(name):
    for hosts in (2, 4, 8):
        assert WORKLOADS[name].batch % hosts == 0


def test_an_unknown_workload_is_refused():
    with pytest.raises(UsageError, match="no workload `mlp`"):
        find_workload("mlp")
