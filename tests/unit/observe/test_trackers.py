"""Trackers get the numbers of a run; a missing library is told before training begins."""

import importlib
import sys
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from shoestring.config import Run
from shoestring.errors import UsageError
from shoestring.observe.trackers import check, open_tracker
from tests.unit.observe.eventfile import read_scalars

RUN = Run(name="fashion", workers=2, shards=("ipc:///a",), codec="dct")


def test_tensorboard_has_files_that_it_reads(tmp_path: Path) -> None:
    tracker = open_tracker("tensorboard", Run(folder=tmp_path))
    tracker.write(10, {"loss": 0.5, "lag": 2.0})
    tracker.write(20, {"loss": 0.25})
    tracker.close()
    (file,) = (tmp_path / "tensorboard").iterdir()
    assert file.name.startswith("events.out.tfevents.")
    assert read_scalars(file) == [
        ("shoestring/loss", 10, 0.5),
        ("shoestring/lag", 10, 2.0),
        ("shoestring/loss", 20, 0.25),
    ]


def test_without_a_folder_a_run_gets_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tracker = open_tracker("tensorboard", Run(name="mine"))
    tracker.close()
    (folder,) = (tmp_path / "shoestring-runs").iterdir()
    assert folder.name.startswith("mine-")
    assert (folder / "tensorboard").is_dir()


class Page:
    """A run of a library with the interface of Weights & Biases."""

    def __init__(self, **given: Any) -> None:
        self.given = given
        self.rows: list[dict[str, Any]] = []
        self.axes: list[tuple[str, Any]] = []
        self.is_finished = False

    def log(self, values: dict[str, Any]) -> None:
        self.rows.append(values)

    def finish(self) -> None:
        self.is_finished = True


class PageWithAxes(Page):
    def define_metric(self, name: str, step_metric: str | None = None, hidden: bool = False) -> None:
        self.axes.append((name, step_metric))


@pytest.fixture
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Stands for `wandb` or `trackio`, whichever is asked for."""
    module: Any = ModuleType(request.param)
    module.__spec__ = importlib.util.spec_from_loader(request.param, None, origin="here")
    module.pages = []

    def init(**given: Any) -> Page:
        module.pages.append((PageWithAxes if request.param == "wandb" else Page)(**given))
        return module.pages[-1]

    module.init, module.run = init, None
    module.current_run = ContextVar("current_run", default=None)
    monkeypatch.setitem(sys.modules, request.param, module)
    return module


BOTH = pytest.mark.parametrize("library", ["wandb", "trackio"], indirect=True)


@BOTH
def test_a_page_is_opened_written_and_finished(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    name = library.__name__
    tracker = open_tracker(name, RUN)
    tracker.write(10, {"loss": 0.5, "lag": 2.0})
    tracker.close()
    (page,) = library.pages
    config = {"workers": 2, "codec": "dct", "policy": None}
    assert page.given == {"project": "shoestring", "name": "fashion", "config": config}
    assert page.rows == [{"shoestring/step": 10, "shoestring/loss": 0.5, "shoestring/lag": 2.0}]
    assert page.is_finished
    if name == "wandb":
        assert page.axes == [("shoestring/step", None), ("shoestring/*", "shoestring/step")]
    monkeypatch.setenv(f"{name.upper()}_PROJECT", "mine")
    open_tracker(name, RUN)
    assert library.pages[1].given["project"] == "mine"


@BOTH
def test_a_page_that_the_script_has_opened_is_used_and_left_open(library: Any) -> None:
    page = PageWithAxes()
    library.run = page
    library.current_run.set(page)
    tracker = open_tracker(library.__name__, RUN)
    tracker.write(10, {"loss": 0.5})
    tracker.close()
    assert page.rows == [{"shoestring/step": 10, "shoestring/loss": 0.5}]
    assert (library.pages, page.is_finished) == ([], False)


@pytest.mark.parametrize("library", ["wandb"], indirect=True)
def test_a_page_that_cannot_be_opened_is_told_with_a_way_out(library: Any) -> None:
    def init(**given: Any) -> None:
        raise RuntimeError("no API key")

    library.init = init
    with pytest.raises(UsageError, match="`wandb` could not be opened: no API key") as caught:
        open_tracker("wandb", RUN)
    assert "WANDB_MODE=offline" in caught.value.hint


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio"])
def test_a_missing_library_is_told_before_training_begins(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda library: None)
    with pytest.raises(UsageError, match=f"the tracker `{name}` needs `") as caught:
        check(name)
    assert caught.value.hint.startswith("run `pip install ")
    check(name, is_used_here=False)


def test_a_folder_of_the_librarys_name_is_not_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wandb").mkdir()  # as runs leave it behind
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(UsageError, match="`wandb`, which is not installed"):
        check("wandb")


def test_an_unknown_tracker_is_refused() -> None:
    with pytest.raises(UsageError, match="there is no tracker `mlflow`") as caught:
        check("mlflow", is_used_here=False)
    assert caught.value.hint == "the trackers are tensorboard, wandb, trackio"
