"""Every study that a document names is there, with the options it is given."""

import importlib
import re
from pathlib import Path

import pytest
import typer

from benchmarks.command import Command
from tests.docs.blocks import ROOT, documents

_SHOWN = re.compile(r"(?:`|^\$ )python -m (benchmarks[\w.]*)([^`\n]*)", re.MULTILINE)


def shown() -> list[tuple[Path, str, str]]:
    """Each document, module and options of a command that runs a study."""
    files = [*documents(), ROOT / "Makefile", ROOT / "CHANGELOG.md", ROOT / "constraints-peers.txt"]
    return [(file, *found.groups()) for file in files for found in _SHOWN.finditer(file.read_text())]


def find(name: str) -> Command:
    """What `python -m` runs under this name."""
    module = importlib.import_module(name)
    main = importlib.import_module(f"{name}.__main__").main if hasattr(module, "__path__") else module.main
    assert isinstance(main, Command)
    assert main.module == name
    return main


def test_documents_name_studies():
    folders = {file.parent.name for file in (ROOT / "benchmarks").glob("*/__init__.py")}
    assert folders <= {name.split(".")[1] for file, name, _ in shown() if file.parent.name == "benchmarks"}


@pytest.mark.parametrize("name", sorted({name for _, name, _ in shown()} - {"benchmarks.draw"}))
def test_study_takes_the_options_it_is_shown_with(name):
    main = find(name)
    for file, shown_name, options in shown():
        if shown_name == name:
            parse(main, options, file)


def parse(main: Command, options: str, file: Path) -> None:
    try:
        typer.main.get_command(main.app()).make_context(main.program, options.split())
    except Exception as error:
        raise AssertionError(f"{file.name}: `{main.program}{options}`") from error


def test_an_option_that_is_not_there_is_noticed():
    with pytest.raises(AssertionError, match="--fast"):
        parse(find("benchmarks.train"), " --fast", ROOT / "README.md")
