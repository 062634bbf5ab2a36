"""Settings of the project's habits name what there is: commit hooks, workflows, templates, quick tests."""

import ast
import functools
import os
import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

import shoestring

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
TARGETS = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
QUICK = (ROOT / "tests" / "quick.txt").read_text().splitlines()


def load(path: Path):
    return yaml.safe_load(path.read_text())


def steps(path: Path) -> list[dict]:
    return [step for job in load(path)["jobs"].values() for step in job["steps"]]


# Quick tests.


@functools.cache
def quick_files() -> list[Path]:
    """Test files that `make quick` runs, whole or in part."""
    paths = [ROOT / line.partition("::")[0] for line in QUICK]
    return [file for path in paths for file in (sorted(path.rglob("test_*.py")) if path.is_dir() else [path])]


@functools.cache
def rooms() -> list[Path]:
    """Folders of the package, relative to it, that hold code."""
    modules = [
        file for file in (ROOT / "shoestring").rglob("*.py") if len(ast.parse(file.read_text()).body) > 1
    ]
    return sorted({file.parent.relative_to(ROOT / "shoestring") for file in modules})


@functools.cache
def rooms_imported_by(file: Path) -> set[Path]:
    """Rooms whose modules a test file names in its imports."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    modules = [ROOT / f"{name.replace('.', '/')}.py" for name in names if name.startswith("shoestring.")]
    return {module.parent.relative_to(ROOT / "shoestring") for module in modules if module.is_file()}


def mirrors(file: Path, room: Path) -> bool:
    """Say whether a test file is named after a room: in the folder of that name, or `test_ROOM*.py`."""
    home = Path("tests") / "unit" / room
    own = file.relative_to(ROOT)
    return own.parent == home or (own.parent == home.parent and own.name.startswith(f"test_{room.name}"))


def test_there_are_rooms():
    assert {Path("."), Path("codec/dct/cpu"), Path("wire")} <= set(rooms())


@pytest.mark.parametrize("room", rooms(), ids=str)
def test_a_room_is_not_too_full(room):
    """A room with more files than one can look over is two rooms."""
    files = [file for file in (ROOT / "shoestring" / room).glob("*.py") if file.name != "__init__.py"]
    assert len(files) <= 15


@pytest.mark.parametrize("line", QUICK)
def test_a_quick_test_exists(line):
    path, _, name = line.partition("::")
    assert (ROOT / path).exists()
    assert not name or f"def {name.partition('[')[0]}(" in (ROOT / path).read_text()


@pytest.mark.parametrize("room", rooms(), ids=str)
def test_every_room_has_a_quick_test(room):
    assert any(mirrors(file, room) or room in rooms_imported_by(file) for file in quick_files()), (
        f"add a fast test of `shoestring/{room}` to tests/quick.txt"
    )


# Workflows.


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_commands_that_there_are(path):
    found = load(path)
    assert found["name"] == path.stem
    assert found[True]  # `on` is YAML's word for true
    assert found["permissions"] == {"contents": "read"}
    for job in found["jobs"].values():
        assert set(job.get("needs", [])) <= set(found["jobs"])
    for step in steps(path):
        assert ("run" in step) != ("uses" in step)
        for line in step.get("run", "").splitlines():
            program, *words = shlex.split(line)
            if program == "make":
                assert set(words) <= TARGETS
            elif program == "grep":
                assert (ROOT / words[-1]).is_file()
            else:
                assert os.access(ROOT / program, os.X_OK), line


def test_all_tests_run_on_every_version_from_the_oldest_on():
    (job,) = load(ROOT / ".github" / "workflows" / "test.yml")["jobs"].values()
    versions = job["strategy"]["matrix"]["python"]
    assert versions == [f"3.{11 + n}" for n in range(len(versions))]
    assert PYPROJECT["project"]["requires-python"] == f">={versions[0]}"
    named = [
        line.rpartition(" ")[2] for line in PYPROJECT["project"]["classifiers"] if ":: Python :: 3." in line
    ]
    assert named == versions[: len(named)]
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]
    assert "\nmake test\n" in (ROOT / ".ci" / "run").read_text()
    assert job["timeout-minutes"] == 25


@pytest.mark.parametrize(
    ("tag", "heading", "is_right"),
    [
        (f"v{shoestring.__version__}", f"## [{shoestring.__version__}] - 2026-01-01\n", True),
        (f"v{shoestring.__version__}", "## [Unreleased]\n", False),
        ("v99.0.0", "## [99.0.0] - 2026-01-01\n", False),
    ],
)
def test_a_release_has_its_version_and_its_changelog(tmp_path, tag, heading, is_right):
    (check,) = [
        step["run"] for step in steps(ROOT / ".github" / "workflows" / "release.yml") if "name" in step
    ]
    (tmp_path / "shoestring").mkdir()
    (tmp_path / "shoestring" / "__init__.py").write_text((ROOT / "shoestring" / "__init__.py").read_text())
    (tmp_path / "CHANGELOG.md").write_text(heading)
    given = {**os.environ, "GITHUB_REF_NAME": tag}
    done = subprocess.run(["bash", "-e", "-c", check], cwd=tmp_path, env=given, capture_output=True)
    assert (done.returncode == 0) == is_right


def pinned(name: str) -> dict[str, str]:
    lines = (ROOT / name).read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def test_integrations_are_tested_with_the_versions_of_everything_else():
    own, others = pinned("constraints.txt"), pinned("constraints-integrations.txt")
    shared = own.keys() & others.keys()
    assert {"numpy", "pytest", "torch"} <= shared
    assert {name: own[name] for name in shared} == {name: others[name] for name in shared}


# Templates and hooks.


def test_commits_are_checked_as_lint_does():
    (local,) = load(ROOT / ".pre-commit-config.yaml")["repos"]
    assert local["repo"] == "local"
    assert all(hook["language"] == "system" for hook in local["hooks"])  # nothing is fetched
    recipe = re.search(r"^lint:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)[1]
    linted = [line.strip().removeprefix("$(BIN)/").removesuffix(" .") for line in recipe.splitlines()]
    hooked = [
        hook["entry"].removeprefix(".venv/bin/").removesuffix(" --force-exclude") for hook in local["hooks"]
    ]
    assert hooked == linted


def test_issue_forms_ask_for_what_they_need():
    assert {path.stem for path in FORMS} >= {"bug", "idea"}
    for path in FORMS:
        form = load(path)
        if path.stem == "config":
            continue
        assert form["name"]
        assert form["description"]
        asked = [part["id"] for part in form["body"] if part["type"] != "markdown"]
        assert len(set(asked)) == len(asked) > 0


def test_files_that_templates_name_exist():
    for path in [*FORMS, ROOT / ".github" / "PULL_REQUEST_TEMPLATE.md"]:
        for name in re.findall(r"\b[A-Z]+\.md\b", path.read_text()):
            assert (ROOT / name).is_file(), name
        for target in re.findall(r"`make ([a-z]+)`", path.read_text()):
            assert target in TARGETS


def test_no_registry_is_named():
    hosts = ["py" + "pi.org", "python" + "hosted.org", "ana" + "conda.org"]
    folders = [".github", "docs", "deploy", "shoestring"]
    files = [
        file
        for folder in folders
        for file in (ROOT / folder).rglob("*")
        if file.suffix in (".yml", ".md", ".py")
    ]
    files += [
        ROOT / name for name in ("Makefile", "pyproject.toml", "constraints.txt", ".pre-commit-config.yaml")
    ]
    assert [file for file in files if any(host in file.read_text() for host in hosts)] == []
