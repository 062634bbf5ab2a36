"""The command line of every study: its help, its examples, and errors that read as those of `shoestring`."""

import importlib
from pathlib import Path

import pytest
import typer

from benchmarks.command import Command, say
from shoestring.errors import UsageError

ROOT = Path(__file__).parents[3]


def studies() -> dict[str, Command]:
    """Every module of `benchmarks/` with a command line, by the name that `python -m` takes."""
    found = {}
    for file in sorted((ROOT / "benchmarks").rglob("*.py")):
        if "\nmain = Command(" in file.read_text():
            module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
            found[module.removesuffix(".__main__")] = importlib.import_module(module).main
    return found


STUDIES = studies()


def run(capsys, main, *args):
    with pytest.raises(SystemExit) as left:
        main(list(args))
    return left.value.code, *capsys.readouterr()


def test_there_are_studies_to_check():
    folders = {file.parent.name for file in (ROOT / "benchmarks").glob("*/__init__.py")}
    assert {name.split(".")[1] for name in STUDIES} == folders


@pytest.mark.parametrize("name", STUDIES)
def test_help_shows_how_the_study_is_run(name, capsys):
    main = STUDIES[name]
    code, out, err = run(capsys, main, "--help")
    assert (code, err, main.program) == (0, "", f"python -m {name}")
    assert f"Usage: {main.program} [OPTIONS]" in out
    assert "Examples" in out
    assert "--json" in out
    assert main.examples


@pytest.mark.parametrize("name", STUDIES)
def test_examples_name_options_that_the_study_has(name):
    main = STUDIES[name]
    for options in main.examples:
        typer.main.get_command(main.app()).make_context(main.program, options.split())


@pytest.mark.parametrize("name", STUDIES)
def test_a_missing_folder_is_refused_before_anything_is_measured(name, capsys, tmp_path):
    given = ["data"] if name == "benchmarks.fleet.simulate" else []
    folder = tmp_path / "missing"
    assert run(capsys, STUDIES[name], *given, "--json", "--output", str(folder / "it.json")) == (
        2, "", f"error: there is no folder `{folder}`\n\nhint: make it, or give another `--output`\n"
    )  # fmt: skip


def fail(quick: bool = False) -> None:
    raise UsageError("found `3`", hint="give `2`")


def test_errors_read_as_those_of_shoestring(capsys):
    main = Command(fail, "benchmarks.fail", ())
    assert run(capsys, main) == (2, "", "error: found `3`\n\nhint: give `2`\n")
    code, out, err = run(capsys, main, "--slow")
    assert (code, out) == (2, "")
    assert err.startswith("error: No such option: --slow")
    assert err.endswith("\n\nhint: run `python -m benchmarks.fail --help` to see what it takes\n")


def test_what_is_said_leaves_stdout_alone(capsys):
    say("half of it is done")
    assert capsys.readouterr() == ("", "half of it is done\n")
