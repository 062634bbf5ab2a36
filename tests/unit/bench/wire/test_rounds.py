"""Rounds between real processes: the rows, what is checked before a time counts, what is left behind."""

import hashlib
import json
from dataclasses import asdict

import numpy as np
import pytest

from shoestring.bench.link import hosts, peers
from shoestring.bench.wire import likeness, replay
from shoestring.bench.wire import rounds as wire
from shoestring.cli import main
from shoestring.codec.base import Layout
from shoestring.errors import ShoestringError, UsageError

DCT = "dct:bits=0.1"
TINY = wire.Effort(size_mb=0.2, blocks=2, times=dict.fromkeys(hosts.LINKS, 1))
KEYS = {
    "codec", "link", "workers", "shards", "size_mb", "round_ms", "round_min_ms", "gloo_allreduce_ms",
    "gloo_min_ms", "ratio", "up_bytes", "down_bytes", "has_keys", "limit_ms", "limit_fraction", "blocks",
    "rounds", "correct",
}  # fmt: skip


def slowest_link():
    """The slowest link that this machine can have: without root that is loopback."""
    return [link for link in hosts.LINKS if not hosts.missing(link)][-1]


@pytest.mark.slow
def test_rounds_give_the_bits_of_a_plain_loop():
    link = slowest_link()
    with hosts.connected(link) as joined:
        rows = wire.measure_link(joined, TINY)
    assert [(row.codec, row.link, row.workers, row.shards) for row in rows] == [
        (codec, link, 2, 2) for codec in wire.CODECS
    ]
    for row in rows:
        assert set(asdict(row)) == KEYS
        assert row.correct is True
        assert row.rounds == 2
        assert 0 < row.round_min_ms <= row.round_ms
        assert row.ratio == row.round_ms / row.gloo_allreduce_ms
        assert row.has_keys == (link != "loopback") == (row.limit_ms is not None)
    plain, *coded = rows
    assert plain.up_bytes > 4 * 50_000  # every value, and headers
    assert all(row.up_bytes < plain.up_bytes / 10 for row in coded)


def test_replicas_that_differ_are_not_timed(monkeypatch):
    monkeypatch.setattr(replay, "RATE", 0.06)  # the plain loop trains otherwise than the workers
    wanted = replay.digest(1000, "float32", 2, 1)
    monkeypatch.undo()
    assert replay.digest(1000, "float32", 2, 1) != wanted

    class Worker:
        def __init__(self, found, wanted):
            self.answer = {"found": found, "rounds": 3, "wanted": wanted}

        def tell(self, **command):
            pass

        def hear(self):
            return self.answer

    wire._check([Worker("a", "a"), Worker("a", None)], "float32", is_replayed=True)
    with pytest.raises(ShoestringError, match="not what a plain loop gives"):
        wire._check([Worker("a", "b"), Worker("a", None)], "float32", is_replayed=True)
    with pytest.raises(ShoestringError, match="different parameters"):
        wire._check([Worker("a", "a"), Worker("b", None)], "float32", is_replayed=True)


def test_plain_loop_is_sgd_with_momentum_on_the_mean():
    values, (one, other) = 3000, [likeness.Gradients(3000, worker) for worker in range(2)]
    params, buffer = likeness.parameters(values), np.zeros(values, np.float32)
    for number in (1, 2, 3):
        mean = np.float32(0.5) * (one.of(number) + other.of(number))
        buffer = np.float32(0.9) * buffer + mean
        params += np.float32(-0.05) * buffer
    wanted = hashlib.sha256(params.data).hexdigest()
    assert replay.digest(values, "float32", workers=2, rounds=3) == wanted
    assert replay.digest(values, DCT, workers=2, rounds=3) != wanted


@pytest.mark.parametrize("values", [1, 63, 50_000, 10_000_000])
def test_shapes_hold_all_values(values):
    shapes = likeness.shapes(values)
    assert Layout.of(shapes).total == values
    assert all(min(shape) > 0 for shape in shapes)


def test_gradients_are_the_workers_own_and_new_each_round():
    one, again, other = (likeness.Gradients(4096, worker) for worker in (0, 0, 1))
    np.testing.assert_array_equal(one.of(5), again.of(5))
    assert not np.array_equal(one.of(5), one.of(6))
    assert not np.array_equal(one.of(5), other.of(5))
    assert np.corrcoef(one.of(5), other.of(5))[0, 1] > 0.2  # what all workers see


def test_process_that_fails_says_why():
    told = {"be": "shard", "index": 0, "shards": 1, "run": "bench", "threads": 1, "codecs": []}
    told |= {"address": "tcp://192.0.2.1:0", "keys": None}  # beyond this machine, without keys
    with peers.started(hosts.Hosts(), 0, "the shard", told) as peer:
        with pytest.raises(
            ShoestringError, match="the shard of the benchmark failed: .*without keys"
        ) as found:
            peer.hear()
        assert "shoestring keys new" in found.value.hint


@pytest.mark.slow
def test_command_prints_one_object(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(wire, "QUICK", TINY)
    file = tmp_path / "wire.json"
    options = ["--link", "loopback", "--codec", DCT, "--output", str(file)]
    with pytest.raises(SystemExit) as left:
        main(["bench", "wire", "--quick", "--json", *options])
    out, err = capsys.readouterr()
    assert left.value.code == 0
    result = json.loads(out, parse_constant=pytest.fail)
    assert json.loads(file.read_text()) == result
    assert set(result) == {"machine", "rows", "left_out"}
    assert [row["codec"] for row in result["rows"]] == [DCT]
    assert result["machine"]["quick"] is True
    assert "measuring rounds on `loopback` (0 of 2)" in err


@pytest.mark.parametrize(
    ("args", "found"),
    [
        (["--link", "10gbit"], "there is no link `10gbit`"),
        (["--codec", "nothing"], "there is no codec `nothing`"),
        (["--output", "/nowhere/at/all.json"], "there is no folder `/nowhere/at`"),
    ],
)
def test_mistakes_are_named(capsys, args, found):
    with pytest.raises(SystemExit) as left:
        main(["bench", "wire", "--quick", *args])
    out, err = capsys.readouterr()
    assert (left.value.code, out) == (UsageError.exit_code, "")
    assert found in err
