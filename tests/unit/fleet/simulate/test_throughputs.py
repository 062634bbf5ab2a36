"""Gavel's throughput file: read whole, or refused with the place that is wrong."""

import json

import pytest

from shoestring.errors import FleetError
from shoestring.fleet.allocate.plan import Demand
from shoestring.fleet.simulate import throughputs
from shoestring.fleet.simulate.throughputs import parse_throughputs, read_throughputs

TABLE = {
    "v100": {
        "('A (batch size 8)', 1)": {
            "null": 10.0,
            "('B', 1)": [8.0, 3.0],
            "('A (batch size 8)', 1)": [6.0, 6.0],
        },
        "('B', 1)": {"null": 4, "('A (batch size 8)', 1)": [3.0, 8.0], "('B', 1)": [0.0, 0.0]},
        "('B', 2)": {"null": 7.0},
    },
    "k80": {"('A (batch size 8)', 1)": {"null": 2.0, "('B', 1)": [1.0, 1.0]}, "('B', 1)": {"null": 0.0}},
}


def demand(work, devices=1):
    return Demand(work, work, 1, {"v100": 1.0}, devices=devices)


def test_file_is_read(tmp_path):
    path = tmp_path / "table.json"
    path.write_text(json.dumps(TABLE))
    table = read_throughputs(path)
    assert table.kinds == ["v100", "k80"]
    assert table.works("v100") == ["A (batch size 8)", "B"]
    assert (table.works("v100", 2), table.works("k80")) == (["B"], ["A (batch size 8)"])
    assert table.speeds("A (batch size 8)", 1, ["v100", "k80", "other"]) == {"v100": 10.0, "k80": 2.0}
    assert table.speeds("B", 1, ["v100", "k80"]) == {"v100": 4.0}
    assert table.speeds("B", 2, ["v100", "k80"]) == {"v100": 7.0}
    assert table.speeds("C", 1, ["v100"]) == {}


def test_pairs_are_found_in_either_order():
    table = parse_throughputs(TABLE)
    a, b = demand("A (batch size 8)"), demand("B")
    assert table.together(a, b, "v100") == (8.0, 3.0)
    assert table.together(b, a, "v100") == (3.0, 8.0)
    assert table.together(b, a, "k80") == (1.0, 1.0)  # written down in the other order only
    assert table.together(a, a, "v100") == (6.0, 6.0)
    assert table.together(b, b, "v100") is None  # two zeros: they cannot
    assert table.together(a, demand("B", 2), "v100") is None
    assert table.together(a, b, "other") is None


@pytest.mark.parametrize(
    ("table", "found"),
    [
        ([], "expected an object"),
        ({"v100": 3}, "expected an object"),
        ({"v100": {"A": {"null": 1}}}, "expected names like"),
        ({"v100": {"('A', 1)": {}}}, 'a speed alone under "null"'),
        ({"v100": {"('A', 1)": {"null": -1}}}, "a speed of 0 or more"),
        ({"v100": {"('A', 1)": {"null": True}}}, "a speed of 0 or more"),
        ({"v100": {"('A', 1)": {"null": "fast"}}}, "a speed of 0 or more"),
        ({"v100": {"('A', 1)": {"null": float("nan")}}}, "a speed of 0 or more"),
        ({"v100": {"('A', 1)": {"null": 1, "('A', 1)": [1]}}}, "two speeds"),
        ({"v100": {"('A', 1)": {"null": 1, "('A', x)": [1, 1]}}}, "expected names like"),
    ],
)
def test_what_is_wrong_is_named(table, found):
    with pytest.raises(FleetError, match=found) as caught:
        parse_throughputs(table)
    assert "Gavel's format" in caught.value.hint


def test_files_that_cannot_be_read(tmp_path, monkeypatch):
    with pytest.raises(FleetError, match="cannot be read: No such file"):
        read_throughputs(tmp_path / "nothing.json")
    path = tmp_path / "broken.json"
    path.write_bytes(b"\xff{")
    with pytest.raises(FleetError, match="`broken.json` is no JSON"):
        read_throughputs(path)
    path.write_text("[" * 100_000)
    with pytest.raises(FleetError, match="`broken.json` is no JSON"):
        read_throughputs(path)
    monkeypatch.setattr(throughputs, "MAX_BYTES", 10)
    with pytest.raises(FleetError, match="more than 10 bytes"):
        read_throughputs(path)
