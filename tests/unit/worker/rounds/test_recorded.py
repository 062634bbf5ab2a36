"""Runs end with the parameters that were recorded: a change that must not change a bit has not changed one.

Recorded are runs with codec `float32`, whose bits are the same on every processor. Runs with `dct`,
whose encoder may fuse multiplications and additions where the processor can, are compared on one
machine before and after a change: `tests/golden/runs/record.py`.
"""

import json
from pathlib import Path

import pytest

from tests.golden.runs.record import hash_of
from tests.golden.runs.schedule import run

RECORDED = json.loads((Path(__file__).parents[3] / "golden" / "runs" / "recorded.json").read_text())


@pytest.mark.parametrize("name", RECORDED["training"])
def test_training_ends_with_the_recorded_parameters(name):
    codec, policy, workers, shards = name.split()
    assert hash_of(codec, policy, int(workers), int(shards)) == RECORDED["training"][name]


@pytest.mark.parametrize("name", RECORDED["schedule"])
def test_pushes_in_a_fixed_order_end_with_the_recorded_parameters(name):
    codec, bound, workers = name.split()
    assert run(int(workers), int(bound), codec) == RECORDED["schedule"][name]
