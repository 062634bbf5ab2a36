"""What is not on disk is compiled in processes of its own, and said before."""

import pytest

from shoestring.compiled import store
from shoestring.compiled.ahead import have_ready
from shoestring.compiled.store import NotStoredError

PROGRAM = """
import os, sys
from pathlib import Path
folder = Path(os.environ["STORED"])
if sys.argv[1] != "broken":
    (folder / sys.argv[1]).write_text(str(os.getpid()))
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where a job's kernels are said to lie."""
    (tmp_path / "own_jobs.py").write_text(PROGRAM)
    monkeypatch.setattr(store, "_folder", tmp_path / "kernels")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("STORED", str(tmp_path))
    return tmp_path


def jobs_of(folder, done, *names):
    def job(name: str) -> None:
        if getattr(store._here, "loads_only", False) and not (folder / name).exists():
            raise NotStoredError(name)
        done.append(name)

    return {name: lambda name=name: job(name) for name in names}


def test_what_is_missing_is_compiled_elsewhere_and_said_once(folder):
    said, done = [], []
    (folder / "one").touch()
    have_ready("own_jobs", jobs_of(folder, done, "one", "two", "three"), said.append)
    assert said == ["compiling kernels for this machine, once: two, three"]
    assert done == ["one", "two", "three"]
    assert len({(folder / name).read_text() for name in ("two", "three")}) == 2  # processes
    have_ready("own_jobs", jobs_of(folder, done, "one", "two", "three"), said.append)
    assert len(said) == 1


def test_what_others_compile_meanwhile_is_loaded(folder, monkeypatch):
    said, done = [], []
    lock = store._wait_for

    def compile_elsewhere(file) -> None:
        (folder / "two").touch()
        lock(file)

    monkeypatch.setattr(store, "_wait_for", compile_elsewhere)
    have_ready("own_jobs", jobs_of(folder, done, "two"), said.append)
    assert (said, (folder / "two").read_text()) == ([], "")
    assert done == ["two"]


def test_what_cannot_be_kept_is_compiled_here_alone(folder, monkeypatch):
    said, done = [], []
    (folder / "file").touch()
    monkeypatch.setattr(store, "_folder", folder / "file" / "kernels")
    have_ready("own_jobs", jobs_of(folder, done, "two"), said.append)
    assert said == ["compiling kernels which cannot be kept: two"]
    assert done == ["two"]
    assert not (folder / "two").exists()


@pytest.mark.parametrize("module", ["own_jobs", "no_such_module"])
def test_what_cannot_be_compiled_elsewhere_is_compiled_here(folder, module):
    done = []
    have_ready(module, jobs_of(folder, done, "broken"), lambda text: None)
    assert done == ["broken"]
