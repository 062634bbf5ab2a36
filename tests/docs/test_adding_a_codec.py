"""The codec of CONTRIBUTING.md, put into a package as told there, is found and works."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT, blocks_of

CONTRIBUTING = ROOT / "CONTRIBUTING.md"


@pytest.fixture
def environment(tmp_path):
    """Lay the example out as an installed package and put it on the path."""
    section = CONTRIBUTING.read_text().partition("## Adding a codec")[2]
    codec, _, project = blocks_of(CONTRIBUTING, section.partition("\n## ")[0])
    package = tmp_path / "my_package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "truncate.py").write_text(codec.text)
    info = tmp_path / "my_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n")
    for group, entries in tomllib.loads(project.text)["project"]["entry-points"].items():
        lines = [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
        (info / "entry_points.txt").write_text("\n".join(lines))
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}


def test_codecs_lists_it(environment):
    command = [Path(sys.executable).with_name("shoestring"), "codecs", "--json"]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    (entry,) = [entry for entry in json.loads(done.stdout) if entry["name"] == "truncate"]
    assert entry["options"] == [{"name": "width", "type": "int", "default": 2}]


def test_make_codec_builds_it(environment):
    source = "import shoestring; print(shoestring.make_codec('truncate:width=3').spec)"
    command = [sys.executable, "-c", source]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout == "truncate:width=3\n"
