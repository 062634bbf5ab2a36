"""Calibration and the rows: prices found again, comparisons, files, the command."""

import json
import threading
import time
from dataclasses import asdict, replace

import pytest

from benchmarks.scale import crowd as scalecrowd
from benchmarks.scale import runs as scaleruns
from benchmarks.scale import suite as scale
from benchmarks.scale.__main__ import main
from benchmarks.scale.costs import Costs, Crowd, Price, Run, Usage, fit_costs
from benchmarks.scale.model import Cluster
from benchmarks.scale.peer import thread_seconds
from shoestring.errors import UsageError
from shoestring.model.parts import assign

DCT = "dct:bits=0.1"
COSTS = Costs(
    DCT,
    up=Price(200, 0.01),
    down=Price(150, 0.012),
    encode=Price(1e-4, 4e-9),
    apply=Price(5e-5, 7e-10),
    worker_io=Price(2e-5, 1.2e-9),
    shard_io=Price(3e-5, 1.1e-9),
    service=Price(4e-5, 2e-10),
    wake_s=5e-5,
    gather=Price(2e-5, 1e-9),
    update=Price(1e-4, 8e-9),
    crowd=Crowd(1e-8, 2e-6, 5e-7, 2e-5, 3e-5),
)
SMALL = scale.Effort(scaleruns.QUICK, (2, 4), (8, 100), (8.0,))
KEYS = {
    "workers", "shards", "parts", "link", "codec", "size_mb", "round_ms", "limit_ms", "shard_load",
    "shard_cores", "link_load", "shard_memory_mb", "bottleneck", "problem",
}  # fmt: skip


def run_of(workers, size_mb):
    """What a run would measure if the prices were all there is."""
    parts = scaleruns.parts_of(size_mb)
    sizes = tuple(part.size for part in parts)
    count, values = workers * len(sizes), workers * sum(sizes)
    up, down = (sum(round(price.of(size)) for size in sizes) for price in (COSTS.up, COSTS.down))
    traffic = workers * (up + down)

    def spent(price, messages, size):
        return price.fixed * messages + price.each * size

    crowd = COSTS.crowd
    usage = Usage(
        exchange=spent(COSTS.encode, count, values) + count * workers * (2 * crowd.look_s + crowd.poll_s),
        training=spent(COSTS.apply, count, values),
        worker_io=spent(COSTS.worker_io, 2 * count, traffic),
        service=spent(COSTS.service, 2 * count, traffic) + COSTS.wake_s * len(sizes) * (workers + 1),
        update=spent(COSTS.gather, count, values) + spent(COSTS.update, len(sizes), sum(sizes)),
        shard_io=spent(COSTS.shard_io, 2 * count, traffic),
    )
    homes = assign(parts, workers)
    return Run(
        codec=DCT,
        workers=workers,
        parts=sizes,
        homes=homes,
        round_s=1.0,
        fastest_s=1.0,
        rounds=3,
        usage=usage,
        up_bytes=up,
        down_bytes=down,
        memory_bytes=10_000_000,
        size_mb=size_mb,
        others=0.0,
        cores=2,
        threads=1,
    )


RUNS = [run_of(workers, size_mb) for size_mb in (8.0, 40.0) for workers in (2, 4, 8)]


def test_prices_are_found_again():
    found = fit_costs([run for run in RUNS if run.workers in (2, 4)], COSTS.crowd)
    for name in ("encode", "apply", "worker_io", "shard_io", "service", "gather", "update"):
        price, wanted = getattr(found, name), getattr(COSTS, name)
        assert price.fixed == pytest.approx(wanted.fixed, rel=1e-3), name
        assert price.each == pytest.approx(wanted.each, rel=1e-3), name
    assert found.up.each == pytest.approx(0.01, rel=5e-3)  # whole bytes are counted for each part
    assert found.wake_s == pytest.approx(COSTS.wake_s, rel=1e-3)
    assert found.crowd == COSTS.crowd


def test_no_price_is_below_zero():
    # Larger messages that cost less: noise, which must not make a huge message pay back.
    runs = [replace(run, usage=replace(run.usage, training=run.workers / run.values)) for run in RUNS]
    found = fit_costs(runs, Crowd())
    assert found.apply.each == 0.0
    assert found.apply.fixed > 0


def test_costs_are_of_one_codec():
    with pytest.raises(ValueError, match="one codec"):
        fit_costs([RUNS[0], replace(RUNS[1], codec="float32")], Crowd())


def test_every_run_is_compared_also_those_that_no_price_comes_from():
    truth = [replace(run, round_s=scale.predict(run, COSTS)) for run in RUNS]
    _, comparisons = scale.calibrate(truth, (2, 4), lambda some: fit_costs(some, COSTS.crowd))
    assert [entry.is_fitted for entry in comparisons] == [True, True, False] * 2
    assert all(abs(entry.error) < 1e-3 for entry in comparisons)
    slower = [replace(run, round_s=2 * run.round_s) for run in truth]
    _, comparisons = scale.calibrate(slower, (2, 4), lambda some: fit_costs(some, COSTS.crowd))
    assert all(entry.error == pytest.approx(-0.5, abs=1e-3) for entry in comparisons)


def test_memory_is_values_pushes_and_an_answer():
    cluster = Cluster(5, 2, (1000, 400), (0, 1))
    lossy = 4 * 1000 * 3 + 5 * (200 + 10) + (150 + 12)
    assert scale.memory_bytes(cluster, COSTS) == pytest.approx(lossy)
    plain = replace(COSTS, codec="float32", up=Price(0, 4), down=Price(0, 4))
    assert scale.memory_bytes(cluster, plain) == 4 * 1000 * (2 + 5 + 1)


def sweep():
    return scale.sweep(SMALL, [COSTS], lambda what, done, total: None)


def test_the_sweep_has_a_row_for_every_case():
    rows = sweep()
    parts = len(scaleruns.parts_of(8.0))
    assert 8 < parts < 100
    expected = [(8, 8), (100, parts), (100, 100)]  # more shards than parts are shown beside as many
    assert [(row.link, row.workers, row.shards) for row in rows] == [
        (link, *counts) for link in scale.LINKS for counts in expected
    ]
    for row in rows:
        assert set(asdict(row)) == KEYS
        assert row.round_ms > row.limit_ms > 0
        assert 0 < row.shard_load <= 1
        assert 0 < row.link_load <= 1
        assert row.problem == ""
    idle = rows[2].round_ms - rows[1].round_ms
    assert idle > 0  # shards without a part only cost


def test_what_cannot_be_set_up_is_said(monkeypatch):
    monkeypatch.setattr(scale, "SOCKET_LIMIT", 99)
    assert [row.problem != "" for row in sweep()] == [False, False, True] * 2


def test_a_round_that_never_ends_is_a_row_too():
    busy = replace(COSTS, crowd=Crowd(message_s=0.01))  # 100 workers' beats take two seconds of each
    rows = scale.sweep(SMALL, [busy], lambda what, done, total: None)
    assert [(row.round_ms is None, row.bottleneck) for row in rows[1:3]] == [(True, "beats")] * 2
    json.dumps([asdict(row) for row in rows], allow_nan=False)


@pytest.fixture
def saved(tmp_path):
    costs, comparisons = scale.calibrate(RUNS, (2, 4), lambda some: fit_costs(some, COSTS.crowd))
    path = tmp_path / "scale.json"
    path.write_text(json.dumps({"machine": {}, **scale.save(costs, comparisons, sweep())}))
    return path, costs, comparisons


def test_a_calibration_is_read_as_it_was_written(saved):
    path, costs, comparisons = saved
    assert scale.load(path) == scale.load(path, [DCT]) == (costs, comparisons)


@pytest.mark.parametrize(
    "text", ["", "{}", "[1]", '{"calibration": [], "costs": [{"codec": 1}]}', "[" * 5000]
)
def test_what_is_no_calibration_is_refused(tmp_path, text):
    path = tmp_path / "it.json"
    path.write_text(text)
    with pytest.raises(UsageError, match="holds no calibration"):
        scale.load(path)


def test_a_codec_that_was_not_calibrated_is_refused(saved):
    with pytest.raises(UsageError, match="no costs of `float32`"):
        scale.load(saved[0], ["float32"])
    with pytest.raises(UsageError, match="holds no calibration"):
        scale.load(saved[0].with_name("missing.json"))


def test_the_command_takes_a_saved_calibration(saved, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(scale, "FULL", SMALL)
    output = tmp_path / "again.json"
    with pytest.raises(SystemExit) as ended:
        main(["--calibration", str(saved[0]), "--json", "--output", str(output)])
    assert ended.value.code in (0, None)
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads(output.read_text())
    assert set(printed) == {"machine", "calibration", "costs", "rows", "reach"}
    assert len(printed["rows"]) == 6
    with pytest.raises(SystemExit):
        main(["--calibration", str(saved[0])])
    shown = capsys.readouterr().out
    assert "measured" in shown
    assert "25gbit" in shown


def test_the_reach_is_where_a_round_takes_twice_as_long():
    row = replace(sweep()[0], parts=8, shards=8)
    rows = [replace(row, workers=workers, round_ms=ms) for workers, ms in ((8, 10), (32, 15), (128, 60))]
    idle = replace(row, workers=16, shards=16, round_ms=1000.0)  # more shards than parts are left out
    # From 32 to 128 the time is four times as long: the limit of 20 is passed at 32 * 20 / 15.
    found = [entry.workers for entry in scale.find_reach([rows[2], idle, *rows[:2]])]
    assert found == [int(32 * 20 / 15)]
    assert [entry.workers for entry in scale.find_reach(rows[:2])] == [32]
    endless = replace(row, workers=128, round_ms=None)
    assert [entry.workers for entry in scale.find_reach([*rows[:2], endless])] == [32]


def test_threads_are_told_apart():
    is_done, go = threading.Event(), threading.Event()

    def spin():
        while time.thread_time() < 0.02:
            pass
        is_done.set()
        go.wait(60)

    thread = threading.Thread(target=spin, name="spin_3")
    thread.start()
    try:
        assert is_done.wait(60)
        found = thread_seconds()
    finally:
        go.set()
        thread.join(60)
    assert found["spin"] >= 0.019  # what the kernel has counted: all but the last moment
    assert found["MainThread"] > 0


@pytest.mark.slow
def test_real_runs_give_what_the_model_needs():
    effort = scaleruns.Effort(counts=(2,), sizes_mb=(0.2, 4.0), rounds=1)
    runs = scaleruns.measure(effort, ["float32"], lambda what, done, total: None)
    assert [(run.size_mb, run.workers) for run in runs] == [(0.2, 2), (4.0, 2)]
    for run in runs:
        assert run.up_bytes > 4 * run.values  # every value, and headers
        assert run.round_s > 0
        assert all(spent_s > 0 for spent_s in asdict(run.usage).values())
    costs, comparisons = scale.calibrate(runs, (2,), lambda some: fit_costs(some, scalecrowd.measure()))
    assert all(spent_s >= 0 for spent_s in asdict(costs[0].crowd).values())
    assert costs[0].up.each == pytest.approx(4.0, rel=0.01)
    assert all(entry.predicted_ms > 0 for entry in comparisons)


def test_disturbed_rounds_do_not_count_where_there_are_others():
    usage = RUNS[0].usage
    quiet, loud = ([scaleruns.Round(t, usage, 1, 1, 1, others) for t in (3, 1, 2)] for others in (0.01, 0.5))
    assert scaleruns.choose([*loud, *quiet], 3) == quiet
    assert scaleruns.choose([*loud, *quiet[:1]], 5) == [quiet[0], loud[1], loud[2]]
    assert scaleruns.choose(loud, 1) == [loud[1]]
