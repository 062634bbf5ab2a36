"""An exchange with one part left out, all workers in one process."""

import dataclasses

import pytest

from benchmarks.train.ablation import VARIANTS, WHOLE, Exchange, measure
from benchmarks.train.workloads import WORKLOADS

SHORT = dataclasses.replace(WORKLOADS["gpt"], steps=8)


def test_the_whole_takes_far_fewer_bytes_than_without_codes():
    whole = Exchange(WHOLE, SHORT, 0, None).train()
    plain = Exchange(dataclasses.replace(WHOLE, codec="float32", reply="float32"), SHORT, 0, None).train()
    assert 10 * whole[1] < plain[1]
    assert whole[0] == pytest.approx(plain[0], rel=0.1)


def test_uncompressed_bytes_are_those_of_the_rounds():
    variant = dataclasses.replace(WHOLE, codec="float32", reply="float32", h=2)
    (row,) = measure(SHORT, 1, [variant], lambda text: None)
    assert row["fewer_bytes"] == pytest.approx(2.0, rel=0.01)


def test_a_warm_up_is_exchanged_uncompressed_every_step():
    lossless = Exchange(dataclasses.replace(WHOLE, warmup=8), SHORT, 0, None).train()
    every = Exchange(
        dataclasses.replace(WHOLE, codec="float32", reply="float32", h=1), SHORT, 0, None
    ).train()
    assert lossless == every


def test_variants_differ_from_the_whole_in_what_they_say():
    assert len({variant.name for variant in VARIANTS}) == len(VARIANTS)
    assert all(
        dataclasses.replace(one, name="") != dataclasses.replace(WHOLE, name="") for one in VARIANTS[1:]
    )
