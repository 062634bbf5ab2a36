"""`python -m benchmarks.evenness`: shards share models evenly, and the committed figures are this code's."""

import json
from pathlib import Path

import pytest

from benchmarks.evenness.__main__ import main
from benchmarks.evenness.suite import SHARDS, measure

RESULTS = Path(__file__).parents[4] / "benchmarks" / "results" / "evenness.json"
VALUES = {"ResNet-18": 11_689_512, "ResNet-50": 25_557_032, "VGG-16": 138_357_544, "GPT-2": 124_439_808}


def test_no_shard_holds_much_more_than_the_mean(capsys):
    with pytest.raises(SystemExit) as left:
        main(["--json"])
    assert not left.value.code
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads(RESULTS.read_text())  # `python -m benchmarks.evenness --output`
    assert [row["shards"] for row in found["rows"]] == list(SHARDS) * len(VALUES)
    assert all(1 <= row["max_over_mean"] <= 1.05 for row in found["rows"])


def test_shapes_are_those_of_the_known_models():
    assert {row.model: row.values for row in measure()} == VALUES


def test_a_person_gets_a_line_a_model(capsys):
    with pytest.raises(SystemExit):
        main([])
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]] == list(VALUES)
