"""The wheel is pure Python, typed, and holds the package alone. Built without a network."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    done = subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = folder.iterdir()
    return built


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
