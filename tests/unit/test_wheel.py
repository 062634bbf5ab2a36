"""The wheel is pure Python, typed, and holds the package alone; the source distribution can be tested.

Both are built without a network.
"""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def build(kind, folder):
    """Build one distribution into an empty folder; return its file."""
    done = subprocess.run(
        [sys.executable, "-m", "build", f"--{kind}", "--no-isolation", "--outdir", folder, ROOT],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = folder.iterdir()
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build("wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """The unpacked source distribution."""
    archive = build("sdist", tmp_path_factory.mktemp("sdist"))
    with tarfile.open(archive) as opened:
        opened.extractall(archive.parent, filter="data")
    return archive.parent / archive.name.removesuffix(".tar.gz")


def test_runs_on_any_platform(wheel):
    assert wheel.name.startswith("shoestring-")
    assert wheel.name.endswith("-py3-none-any.whl")


def test_holds_the_whole_package_and_nothing_else(wheel):
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    written = {file.relative_to(ROOT).as_posix() for file in (ROOT / "shoestring").rglob("*.py")}
    assert written <= held
    assert "shoestring/py.typed" in held
    assert {name.partition("/")[0] for name in held} == {"shoestring"}


def test_names_command_licence_and_requirements(wheel):
    with zipfile.ZipFile(wheel) as archive:
        text = {
            Path(name).name: archive.read(name).decode()
            for name in archive.namelist()
            if ".dist-info/" in name
        }
    assert "shoestring = shoestring.cli:main" in text["entry_points.txt"]
    assert "License-Expression: Apache-2.0" in text["METADATA"]
    assert "Requires-Python: >=3.11" in text["METADATA"]
    assert "Apache License" in text["LICENSE"]
    # Torch is an extra: a shard's host does without it.
    required = [line for line in text["METADATA"].splitlines() if line.startswith("Requires-Dist:")]
    assert all("extra ==" in line for line in required if "torch" in line or "triton" in line)


def test_sources_hold_what_tests_import_and_read(sources):
    for folder in ("benchmarks", "deploy", "docs", "examples", "shoestring", "tests"):
        written = {file.relative_to(ROOT) for file in (ROOT / folder).rglob("*")}
        assert {file for file in written if file.suffix in (".py", ".md")} <= {
            file.relative_to(sources) for file in (sources / folder).rglob("*")
        }
    assert list((sources / "benchmarks" / "results").glob("*.json"))


def test_tests_of_unpacked_sources_import_their_benchmarks(sources):
    run = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--collect-only", "--quiet"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [*run, "tests/unit/benchmarks", "tests/docs"],
        cwd=sources, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    where = [sys.executable, "-c", "import benchmarks; print(benchmarks.__file__)"]
    found = subprocess.run(where, cwd=sources, env=environment, capture_output=True, text=True, check=True)
    assert Path(found.stdout.strip()) == sources / "benchmarks" / "__init__.py"
