"""`shoestring bench codec`: data to stdout, the rest to stderr, mistakes named."""

import io
import json
import re

import pytest

from shoestring.bench.codec import report
from shoestring.bench.codec import suite as bench
from shoestring.cli import main

SMALL = ["--gradients", "gaussian,zeros", "--size-mb", "0.05", "--quick"]


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Figures do not matter here: measure as little as can be."""
    monkeypatch.setattr(bench, "QUICK", bench.Effort(repeats=1, seconds=0, copy_mib=1))


def run(capsys, *args):
    with pytest.raises(SystemExit) as left:
        main(["bench", "codec", *args])
    out, err = capsys.readouterr()
    return left.value.code, out, err


def test_json_is_alone_on_stdout_and_in_the_file(capsys, tmp_path):
    file = tmp_path / "codec.json"
    code, out, err = run(
        capsys, *SMALL, "--json", "--output", str(file), "--codec", "dct:bits=1", "--codec", "int8"
    )
    assert code == 0
    result = json.loads(out, parse_constant=pytest.fail)
    assert json.loads(file.read_text()) == result
    assert set(result) == {"machine", "rows"}
    assert {"cpu", "memory_bytes", "memcpy_gbps", "packages"} <= set(result["machine"])
    found = [(row["gradients"], row["codec"], row["options"], row["threads"]) for row in result["rows"]]
    assert found == [
        *(("gaussian", "dct", "bits=1.0", 1), ("gaussian", "int8", "", 1)),
        *(("zeros", "dct", "bits=1.0", 1), ("zeros", "int8", "", 1)),
    ]
    nothing = result["rows"][2]
    assert (nothing["entropy_gap"], nothing["nmse"]) == (None, 0)
    assert nothing["bytes"] > 0
    assert all(row["correct"] is True for row in result["rows"])
    assert "measuring on `gaussian` (0 of 4)" in err


def test_table_names_what_was_measured(capsys):
    code, out, _ = run(capsys, *SMALL, "--codec", "dct:block=8,bits=0.1", "--threads", "1,2")
    assert code == 0
    assert "gaussian: 12,500 values" in out
    assert out.count("dct:block=8,bits=0.1") == 4
    assert "…" not in out


@pytest.mark.parametrize(
    ("args", "found"),
    [
        (["--gradients", "conv,nothing"], "there are no gradients `nothing`"),
        (["--codec", "nothing"], "there is no codec `nothing`"),
        (["--threads", "two"], "`--threads two` is no list of numbers"),
        (["--threads", "0"], "`--threads 0` is no list of numbers"),
        (["--backend", "abacus"], "no backend `abacus`"),
        (["--output", "/nowhere/at/all.json"], "there is no folder `/nowhere/at`"),
        (["--data", "/nowhere", "--gradients", "conv"], "`/nowhere` has neither"),
    ],
)
def test_mistakes_are_named(capsys, args, found):
    code, out, err = run(capsys, "--quick", *args)
    assert (code, out) == (2, "")
    error, blank, hint = err.splitlines()[-3:]
    assert error.startswith("error: ")
    assert found in error
    assert blank == ""
    assert hint.startswith("hint: ")


def test_ctrl_c_leaves_quietly_with_130(capsys, monkeypatch):
    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "measure", interrupt)
    code, out, err = run(capsys, *SMALL)
    assert (code, out) == (130, "")
    assert re.fullmatch(r"measuring on `gaussian` \(0 of \d+\)\n", err)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_terminal_gets_one_living_line(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    with report.show_progress(stream) as progress:
        progress("measuring", 0, 3)
        progress("measuring", 1, 3)
    written = stream.getvalue()
    assert "measuring" in written
    assert "1/3" in written
    assert "\x1b[2K" in written  # wiped again


def test_lines_are_few_where_there_is_no_terminal():
    stream = io.StringIO()
    with report.show_progress(stream) as progress:
        for done in range(1000):
            progress("capturing", done, 1000)
    assert stream.getvalue().splitlines() == [f"capturing ({at} of 1000)" for at in (0, 250, 500, 750)]
