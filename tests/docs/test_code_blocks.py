"""Every code block of the documentation runs, or says why not.

Python blocks run in a folder of their own; console blocks run their `shoestring`
commands and compare what is shown (`...` stands for anything). Commands that would
install, clone or build are not run: the targets, extras and files they name must exist.
"""

import doctest
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT, Block, all_blocks, blocks_of, chains, commands_of

BLOCKS = all_blocks()
CONSOLE = [block for block in BLOCKS if block.language in ("console", "bash") and block.not_run is None]
# Blocks under these names would escape the tests.
UNCHECKED_NAMES = {"py", "python3", "pycon", "sh", "shell", "shell-session", "zsh"}
RUNNER = """
import json, sys
for name, line, text in json.load(sys.stdin):
    exec(compile("\\n" * line + text, name, "exec"), globals())
"""


@pytest.mark.parametrize("chain", chains(BLOCKS), ids=lambda chain: chain[0].name)
def test_python_blocks_run(chain, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", RUNNER],
        input=json.dumps([(str(block.file), block.line, block.text) for block in chain]),
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("block", CONSOLE, ids=lambda block: block.name)
def test_console_blocks_do_what_they_show(block, tmp_path):
    for command in commands_of(block):
        words = shlex.split(command.text, comments=True)
        program = words[0].removeprefix(".venv/bin/")
        if program == "shoestring":
            check_run(words[1:], command.output, tmp_path)
        else:
            assert not command.output, f"`{command.text}` shows output but is not run: mark the block"
            check_named_things_exist(program, words[1:])


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.name)
def test_block_is_checked_or_says_why_not(block):
    assert block.language not in UNCHECKED_NAMES, "write `python`, `console` or `bash`"
    assert block.not_run != "", "give the reason: `<!-- not run: reason -->`"


def check_run(args: list[str], shown: str, folder: Path) -> None:
    done = subprocess.run(
        [Path(sys.executable).with_name("shoestring"), *args],
        cwd=folder,
        env=os.environ | {"COLUMNS": "80", "NO_COLOR": "1", "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert (done.returncode != 0) == ("error: " in shown), done.stdout
    if shown:
        checker = doctest.OutputChecker()
        assert checker.check_output(f"{shown}\n", done.stdout.rstrip("\n") + "\n", doctest.ELLIPSIS), (
            done.stdout
        )


def check_named_things_exist(program: str, words: list[str]) -> None:
    if program == "make":
        targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert set(words) <= set(targets)
    elif program in ("python", "python3", "pip"):
        assert program == "pip" or words[:2] in (["-m", "venv"], ["-m", "pip"])
        check_requirements(words)
    elif program == "pytest":
        assert all((ROOT / word).exists() for word in words if not word.startswith("-"))
    else:
        assert program in ("git", "cd") or (ROOT / program).is_file(), (
            f"`{program}` is not checked: mark the block"
        )


def check_requirements(words: list[str]) -> None:
    """Extras that an install names are ours, and so is its constraints file."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for word in words:
        named = re.fullmatch(r"(?:\.|shoestring)\[(.*)\]", word)
        if named:
            assert set(named[1].split(",")) <= set(extras)
    if "-c" in words:
        assert (ROOT / words[words.index("-c") + 1]).is_file()


SAMPLE = """\
```python
a = 1
```

<!-- not run: needs two hosts -->
```console
$ shoestring run
```

<!-- fresh -->
```python
b = 2
```
"""


def test_marks_are_read():
    first, second, third = blocks_of(ROOT / "sample.md", SAMPLE)
    assert (first.line, first.language, first.text) == (1, "python", "a = 1\n")
    assert second.not_run == "needs two hosts"
    assert chains([first, second, third]) == [[first], [third]]


def test_console_block_is_split_into_commands_and_output():
    block = Block(ROOT / "sample.md", 1, "console", "$ shoestring env \\\n  --json\n{\n}\n$ make test\n")
    (first, output), (second, none) = [(command.text, command.output) for command in commands_of(block)]
    assert shlex.split(first) == ["shoestring", "env", "--json"]
    assert (output, second, none) == ("{\n}", "make test", "")
