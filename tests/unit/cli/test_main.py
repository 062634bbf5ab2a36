"""How the command line behaves whatever the command: help, version, errors, Ctrl-C."""

import subprocess
import sys

import pytest
import typer

import shoestring
from shoestring import cli
from shoestring.cli import lazy
from shoestring.errors import CodecError, UnknownCodecError


def run(capsys, *args):
    with pytest.raises(SystemExit) as left:
        cli.main(list(args))
    out, err = capsys.readouterr()
    return left.value.code, out, err


@pytest.fixture
def failing_command(monkeypatch):
    """Put a command `fail` in place that raises what the test wants."""

    def put(error):
        def fail() -> None:
            """Fail."""
            raise error

        monkeypatch.setattr(cli, "fail", fail, raising=False)
        monkeypatch.setitem(lazy.COMMANDS, "fail", "shoestring.cli:fail")

    return put


def test_version(capsys):
    assert run(capsys, "--version") == (0, f"shoestring {shoestring.__version__}\n", "")


@pytest.mark.parametrize("args", [(), ("--help",), ("-h",)])
def test_help_lists_every_command_and_examples(capsys, args):
    code, out, err = run(capsys, *args)
    assert (code, err) == (0, "")
    assert "Examples" in out
    for name in lazy.COMMANDS:
        assert f" {name} " in out


@pytest.mark.parametrize("name", sorted(lazy.COMMANDS))
def test_every_command_has_help(capsys, name):
    code, out, err = run(capsys, name, "--help")
    assert (code, err) == (0, "")
    assert f"shoestring {name}" in out


def test_bench_is_a_group_with_a_codec_command(capsys):
    code, out, _ = run(capsys, "bench", "codec", "--help")
    assert code == 0
    assert "--quick" in out


@pytest.mark.parametrize(
    ("args", "found", "command"),
    [
        (("nothing",), "nothing", "shoestring"),
        (("--nothing",), "--nothing", "shoestring"),
        (("env", "--nothing"), "--nothing", "shoestring env"),
        (("env", "surplus"), "surplus", "shoestring env"),
    ],
)
def test_usage_errors_look_like_all_errors(capsys, args, found, command):
    code, out, err = run(capsys, *args)
    assert (code, out) == (2, "")
    first, blank, hint = err.splitlines()
    assert first.startswith("error: ")
    assert found in first
    assert blank == ""
    assert hint == f"hint: run `{command} --help` to see what it takes"


@pytest.mark.parametrize("kind", [CodecError, UnknownCodecError])
def test_errors_go_to_stderr_with_their_exit_code(capsys, failing_command, kind):
    failing_command(kind("found `3`", hint="give `2`"))
    assert run(capsys, "fail") == (kind.exit_code, "", "error: found `3`\n\nhint: give `2`\n")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), typer.Abort()])
def test_interrupt_leaves_quietly_with_130(capsys, failing_command, error):
    failing_command(error)
    assert run(capsys, "fail") == (130, "", "")


def test_exit_code_of_a_command_is_kept(capsys, failing_command):
    failing_command(typer.Exit(3))
    assert run(capsys, "fail") == (3, "", "")


def test_our_own_mistakes_keep_their_traceback(failing_command):
    failing_command(ZeroDivisionError("a bug"))
    with pytest.raises(ZeroDivisionError):
        cli.main(["fail"])


@pytest.mark.parametrize(
    "args", [["--help"], ["--version"], ["env"], ["bench", "--help"], ["codecs", "--help"]]
)
def test_nothing_heavy_is_imported(args):
    source = f"""
import sys
from shoestring.cli import main
try:
    main({args!r})
except SystemExit as left:
    assert left.code == 0
heavy = {{"numba", "numpy", "torch", "triton"}} & set(sys.modules)
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
