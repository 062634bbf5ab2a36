"""Learning rates are those of the committed search."""

import json
from pathlib import Path

import pytest

from benchmarks.train.contestants import CONTESTANTS
from benchmarks.train.rates import FOUND, rate_of
from benchmarks.train.workloads import WORKLOADS

RESULTS = Path(__file__).parents[4] / "benchmarks" / "results" / "train_rates.json"


@pytest.mark.parametrize("name", WORKLOADS)
def test_each_has_its_best_rate(name):
    sign = 1 if WORKLOADS[name].better == "higher" else -1
    best: dict[str, tuple[float, float]] = {}
    for row in json.loads(RESULTS.read_text())["rates"]:
        if row["workload"] == name and row["final"] is not None:
            own = (sign * row["final"], row["rate"])
            best[row["contestant"]] = max(own, best.get(row["contestant"], own))
    assert {contestant: rate for contestant, (_, rate) in best.items()} == FOUND[name]


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=lambda one: one.name)
@pytest.mark.parametrize("contestant", CONTESTANTS)
def test_every_contestant_has_one_of_the_grid(contestant, workload):
    assert rate_of(contestant, workload) in workload.rates
