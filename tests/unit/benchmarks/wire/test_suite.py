"""What a shard and a worker cost by themselves, and rounds over slow links: all that the study measures."""

import json

import pytest

from benchmarks.wire import shardcost, suite
from benchmarks.wire.__main__ import main
from benchmarks.wire.load import ADAMW, SGD, Load
from shoestring.bench.machine import Memcpy
from shoestring.bench.wire import replay, rounds
from shoestring.errors import ShoestringError, UsageError

DCT = "dct:bits=0.1"
TINY = suite.Effort(
    rounds=rounds.Effort(size_mb=0.2, blocks=2, times={"loopback": 1}),
    memory_mb=0.2,
    footprints=2,
    growth_mb=0.02,
    repeats=1,
)


@pytest.mark.parametrize("rule", [SGD, ADAMW])
@pytest.mark.parametrize("codec", ["float32", DCT])
def test_update_row_counts_the_parameters_once(codec, rule):
    row = shardcost.measure_update(50_000, codec, rule, Memcpy(1), repeats=1)
    assert (row.codec, row.rule, row.workers) == (codec, rule.kind, 2)
    assert row.size_mb == pytest.approx(0.2)
    assert row.update_gbps == pytest.approx(0.2e-3 / (row.update_ms / 1e3))
    assert row.over_memcpy == row.update_gbps / row.memcpy_gbps


def test_wrong_update_is_not_timed(monkeypatch):
    monkeypatch.setattr(replay, "digest", lambda *_: "another")
    with pytest.raises(ShoestringError, match="not what a plain loop gives"):
        shardcost.measure_update(5000, "float32", SGD, Memcpy(1), repeats=1)


def test_growth_is_compared_with_the_best_line():
    rows = shardcost.measure_growth(5000, DCT, [1, 2, 4], repeats=1)
    assert [row.workers for row in rows] == [1, 2, 4]
    for row in rows:
        assert row.worker_ms == row.round_ms / row.workers
        assert row.over_linear == pytest.approx(row.round_ms / row.linear_ms)
    first, second, third = (row.linear_ms for row in rows)
    assert third - second == pytest.approx(2 * (second - first))


def test_load_is_pushed_by_every_worker_and_counted():
    load = Load(50_000, SGD, "float32", workers=6)
    said = list(load.pushes(1))
    assert [worker for worker, _, _ in said[:6]] == list(range(6))
    assert load.round_bytes == 6 * 4 * 50_000


@pytest.mark.slow
def test_command_prints_one_object(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(suite, "QUICK", TINY)
    file = tmp_path / "wire.json"
    options = ["--link", "loopback", "--codec", DCT, "--output", str(file)]
    with pytest.raises(SystemExit) as left:
        main(["--quick", "--json", *options])
    out, err = capsys.readouterr()
    assert left.value.code == 0
    result = json.loads(out, parse_constant=pytest.fail)
    assert json.loads(file.read_text()) == result
    assert set(result) == {"machine", "rows", "left_out", "update", "growth", "memory"}
    assert [row["codec"] for row in result["rows"]] == [DCT]
    assert [(row["codec"], row["rule"]) for row in result["update"]] == [(DCT, "sgd"), (DCT, "adamw")]
    assert [row["workers"] for row in result["growth"]] == [1, 2, 4, 8, 16, 32, 64]
    shard, worker = result["memory"]
    assert (shard["process"], shard["workers"], shard["held_bytes"]) == ("shard", 2, 4 * 200_000)
    pushed = Load(50_000, ADAMW, DCT, 2).round_bytes
    assert shard["limit_bytes"] == 1_000_000 + (64 << 20) + pushed
    assert (worker["process"], worker["limit_bytes"]) == ("worker", 250_000 + (32 << 20))
    assert all(row["holds"] == (row["bytes"] <= row["limit_bytes"]) for row in (shard, worker))
    assert result["machine"]["quick"] is True
    assert "measuring rounds on `loopback` (0 of 2)" in err


@pytest.mark.parametrize(
    ("args", "found"),
    [
        (["--link", "10gbit"], "there is no link `10gbit`"),
        (["--codec", "nothing"], "there is no codec `nothing`"),
    ],
)
def test_mistakes_are_named(capsys, args, found):
    with pytest.raises(SystemExit) as left:
        main(["--quick", *args])
    out, err = capsys.readouterr()
    assert (left.value.code, out) == (UsageError.exit_code, "")
    assert found in err
