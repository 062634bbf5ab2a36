"""`shoestring fleet simulate`: data to stdout, progress to stderr, mistakes named."""

import json

import pytest

from shoestring.cli import main

TABLE = {
    "v100": {"('A', 1)": {"null": 10.0, "('A', 1)": [8.0, 8.0]}},
    "k80": {"('A', 1)": {"null": 2.0, "('A', 1)": [1.0, 1.0]}},
}
LINE = "A\tpython3 a.py\tfolder\t--steps\t1\t{steps}\t1\t1\t-1.000000\t{arrival}\n"


@pytest.fixture
def files(tmp_path):
    table, trace = tmp_path / "table.json", tmp_path / "some.trace"
    table.write_text(json.dumps(TABLE))
    trace.write_text("".join(LINE.format(steps=1000 * (n + 1), arrival=50 * n) for n in range(6)))
    return ["--throughputs", str(table), "--trace", str(trace)]


def run(capsys, *args):
    with pytest.raises(SystemExit) as left:
        main(["fleet", "simulate", *args])
    out, err = capsys.readouterr()
    return left.value.code, out, err


def test_json_is_alone_on_stdout_and_in_the_file(capsys, files, tmp_path):
    output = tmp_path / "result.json"
    args = ["--cluster", "v100=1,k80=2", "--round", "100", "--json", "--output", str(output)]
    code, out, err = run(capsys, *files, *args)
    assert code == 0
    result = json.loads(out, parse_constant=pytest.fail)
    assert json.loads(output.read_text()) == result
    assert result["settings"] == {
        "throughputs": "table.json",
        "trace": "some.trace",
        "cluster": {"v100": 1, "k80": 2},
        "objective": "jct",
        "packing": True,
        "round_s": 100.0,
        "restart_cost_s": 0.0,
        "jobs": None,
        "seed": 0,
    }
    named = ("average_jct_s", "median_jct_s", "p99_jct_s", "makespan_s", "utilisation", "decision_ms")
    assert all(result[name] > 0 for name in named)
    assert result["average_jct_s"] < result["p99_jct_s"] <= result["makespan_s"]
    assert {"cpu", "packages", "load_before"} <= set(result["machine"])
    assert "jobs done (6 of 6)" in err


def test_options_reach_the_simulation(capsys, files):
    def figures(*args):
        return json.loads(run(capsys, *files, "--cluster", "v100=1,k80=1", "--json", *args)[1])

    plain = figures()
    assert figures("--no-packing")["average_jct_s"] != plain["average_jct_s"]
    assert figures("--restart-cost", "60")["average_jct_s"] > plain["average_jct_s"]
    part = figures("--jobs", "0:2")
    assert (part["jobs"], part["settings"]["jobs"]) == (2, "0:2")
    assert plain["cost"] == 0 < figures("--cost", "v100=2.5,k80=0.5")["cost"]
    fifo = figures("--objective", "fifo")
    assert fifo["settings"]["packing"] is False
    for objective in ("makespan", "fair", "cost"):
        assert figures("--objective", objective)["jobs"] == 6


def test_people_get_a_list(capsys, files):
    code, out, _ = run(capsys, *files, "--cluster", "v100=2")
    assert code == 0
    assert "average_jct_s" in out
    assert "{" not in out


@pytest.mark.parametrize(
    ("args", "found"),
    [
        (["--cluster", "v100"], "cannot be read at `v100`"),
        (["--cluster", "v100=-1"], "cannot be read at `v100=-1`"),
        (["--cluster", "v100=1,v100=2"], "cannot be read at `v100=2`"),
        (["--cluster", "v100=0"], "has no devices"),
        (["--cluster", "v100=2000000"], "too many"),
        (["--cluster", "tpu=1"], "no device kind `tpu`"),
        (["--cluster", "v100=1", "--objective", "luck"], "no objective `luck`"),
        (["--cluster", "v100=1", "--jobs", "3"], "is no range of jobs"),
        (["--cluster", "v100=1", "--jobs", "7:9"], "no jobs range(7, 9)"),
        (["--cluster", "v100=1", "--cost", "k80=1"], "names `k80`"),
        (["--cluster", "v100=1", "--cost", "v100=nan"], "cannot be read"),
        (["--cluster", "v100=1", "--restart-cost", "400"], "leaves nothing of a round"),
        (["--cluster", "v100=1", "--output", "/nowhere/at/all.json"], "there is no folder `/nowhere/at`"),
    ],
)
def test_mistakes_are_named(capsys, files, args, found):
    code, out, err = run(capsys, *files, *args)
    assert code != 0
    assert out == ""
    error, blank, hint = err.splitlines()[-3:]
    assert error.startswith("error: ")
    assert found in error
    assert blank == ""
    assert hint.startswith("hint: ")
