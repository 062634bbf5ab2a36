"""docs/architecture.md and the layout in CONTRIBUTING.md name what there is."""

import ast
import functools
import re
import tomllib

from tests.docs.blocks import ROOT, blocks_of
from tests.docs.walks import PAGE, walk

PACKAGE = ROOT / "shoestring"
CONTRIBUTING = ROOT / "CONTRIBUTING.md"


@functools.cache
def definitions(file: str) -> set[str]:
    """Functions, classes and methods of a module, methods as `Class.method`."""
    found = set()
    for node in ast.parse((PACKAGE / file).read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.Assign):  # kernels made from a template
            found |= {
                name.id for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name)
            }
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
    return found


def test_the_picture_shows_the_rooms_in_the_order_of_their_imports():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = [one["layers"] for one in contracts if one.get("containers") == ["shoestring"]]
    (picture,) = blocks_of(PAGE, PAGE.read_text())
    assert [line.split()[0] for line in picture.text.splitlines()] == layers


def test_every_step_names_a_function_that_there_is():
    for title in ("A gradient's way", "A checkpoint's way", "A job's way"):
        steps = walk(title)
        assert len(steps) >= 10
        for file, name in steps:
            assert name in definitions(file), f"{title}: `{file}` `{name}`"


def named_modules() -> list[str]:
    """The files that CONTRIBUTING.md's layout names, each with its folder."""
    section = CONTRIBUTING.read_text().partition("\n## Layout\n")[2]
    (tree, *_) = blocks_of(CONTRIBUTING, section.partition("\n## ")[0])
    names, folders = [], []
    for line in tree.text.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        words = re.match(r"\s*((?:[\w/.]+, )*[\w/.]+)(?:\s{2}|$)", line)
        assert words, line
        for word in words[1].split(", "):
            if word.endswith("/"):
                folders[depth:] = [word]
            else:
                names.append("".join(folders[:depth]) + word)
    return names


def test_the_layout_names_every_module():
    modules = {
        file.relative_to(ROOT).as_posix()
        for file in PACKAGE.rglob("*.py")
        if file.name != "__init__.py" and "__pycache__" not in file.parts
    }
    named = [name for name in named_modules() if name.startswith("shoestring/")]
    assert sorted(named) == sorted(modules)
