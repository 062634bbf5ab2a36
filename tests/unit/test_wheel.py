"""What a release consists of: a source archive that tests can run from, and a wheel with the package alone.

Built once, without a network, as `make dist` does: the wheel comes from the source archive.
"""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import shoestring

ROOT = Path(__file__).parents[2]
FOLDERS = ("benchmarks", "deploy", "docs", "examples", "shoestring", "tests")


def run(*command, **options) -> str:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT)
    return folder


@pytest.fixture(scope="module")
def wheel(dist):
    (built,) = dist.glob("*.whl")
    return built


def test_both_are_named_after_the_version(dist):
    name = f"shoestring-{shoestring.__version__}"
    assert {path.name for path in dist.iterdir()} == {f"{name}.tar.gz", f"{name}-py3-none-any.whl"}


def test_the_source_archive_holds_what_tests_and_documents_name(dist):
    (built,) = dist.glob("*.tar.gz")
    with tarfile.open(built) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    files = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*") if file.is_file()]
    written = {file.relative_to(ROOT).as_posix() for file in files if "__pycache__" not in file.parts}
    assert written <= held
    beside = {name for name in held if name.partition("/")[0] not in FOLDERS}
    assert beside >= {"Makefile", "README.md", "constraints.txt", ".ci/run", ".pre-commit-config.yaml"}
    assert all((ROOT / name).is_file() for name in beside - {"PKG-INFO"})


def test_the_wheel_holds_the_whole_package_and_nothing_else(wheel):
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    written = {file.relative_to(ROOT).as_posix() for file in (ROOT / "shoestring").rglob("*.py")}
    assert written <= held
    assert "shoestring/py.typed" in held
    assert {name.partition("/")[0] for name in held} == {"shoestring"}


def test_the_wheel_names_command_licence_and_requirements(wheel):
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


def test_the_wheel_runs_from_where_it_is_installed(wheel, tmp_path):
    """Its requirements come from this environment; the package itself from the wheel, not from the clone."""
    place = tmp_path / "installed"
    run(
        sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", place, wheel
    )
    environment = {**os.environ, "PYTHONPATH": str(place)}
    where = run(
        sys.executable, "-c", "import shoestring; print(shoestring.__file__)", cwd=tmp_path, env=environment
    )
    assert Path(where.strip()) == place / "shoestring" / "__init__.py"
    version = run(place / "bin" / "shoestring", "--version", cwd=tmp_path, env=environment)
    assert version == f"shoestring {shoestring.__version__}\n"


def test_tests_of_the_unpacked_source_archive_import_its_benchmarks(dist, tmp_path):
    (built,) = dist.glob("*.tar.gz")
    with tarfile.open(built) as archive:
        archive.extractall(tmp_path, filter="data")
    sources = tmp_path / built.name.removesuffix(".tar.gz")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    collect = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--collect-only", "--quiet"]
    run(*collect, "tests/unit/benchmarks", "tests/docs", cwd=sources, env=environment)
    where = run(
        sys.executable, "-c", "import benchmarks; print(benchmarks.__file__)", cwd=sources, env=environment
    )
    assert Path(where.strip()) == sources / "benchmarks" / "__init__.py"
