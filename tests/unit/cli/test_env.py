"""`shoestring env` says what is installed, without importing it."""

import json
import os
import platform

import numpy as np
import pytest

import shoestring
from shoestring.cli import env, main


def test_json_holds_versions_and_machine(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["env", "--json"])
    facts = json.loads(capsys.readouterr().out)
    assert facts["shoestring"] == shoestring.__version__
    assert facts["python"] == platform.python_version()
    assert facts["packages"]["numpy"] == np.__version__
    assert set(facts["packages"]) == {"numpy", "numba", "torch", "triton"}
    assert 1 <= facts["cpu"]["usable_cores"] <= facts["cpu"]["cores"] == os.cpu_count()
    assert facts["cpu"]["model"]
    assert facts["memory_bytes"] > 0


def test_text_names_what_is_missing(capsys, monkeypatch):
    monkeypatch.setattr(env, "PACKAGES", ("numpy", "nobody-has"))
    with pytest.raises(SystemExit, match="0"):
        main(["env"])
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines["numpy"] == np.__version__
    assert lines["nobody-has"] == "not installed"
