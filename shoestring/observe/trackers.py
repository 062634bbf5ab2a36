"""Libraries that keep and draw what a run reports: TensorBoard, Weights & Biases, Trackio.

A tracker takes numbers by name, with the step they belong to. None is needed, and none is imported
before a run asks for it by its setting `tracker`. Where a script has opened a run of Weights & Biases
or Trackio itself, the numbers go there, and it is the script's to finish.
"""

import importlib
import importlib.util
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from shoestring.config import Run
from shoestring.errors import UsageError

PREFIX = "shoestring/"
_STEP = PREFIX + "step"
_WRITERS = ("tensorboardX", "tensorboard")  # the first that is there; both write the same files


class Tracker(Protocol):
    """One run's page in a tracking library. Used by one thread at a time."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add the values of a step, by names without a prefix."""

    def close(self) -> None:
        """Write what has not been written."""


def check(name: str, *, is_used_here: bool = True) -> None:
    """Refuse a tracker that does not exist, or, where it is to be used here, is not installed."""
    if name not in _TRACKERS:
        raise UsageError(f"there is no tracker `{name}`", hint=f"the trackers are {', '.join(_TRACKERS)}")
    libraries, _ = _TRACKERS[name]
    if is_used_here and not any(map(_is_installed, libraries)):
        raise UsageError(
            f"the tracker `{name}` needs {' or '.join(f'`{library}`' for library in libraries)}, "
            "which is not installed",
            hint=f"run `pip install {libraries[0]}`",
        )


def open_tracker(name: str, run: Run) -> Tracker:
    """Open a run's page."""
    check(name)
    _, make = _TRACKERS[name]
    try:
        return make(run)
    except Exception as error:  # another library's: it may want a login, or a network
        raise UsageError(
            f"the tracker `{name}` could not be opened: {error}",
            hint="see that it works in a script of its own; `WANDB_MODE=offline` needs no network or login, "
            "and without `tracker` nothing is tracked",
        ) from error


def _is_installed(library: str) -> bool:
    spec = importlib.util.find_spec(library)
    # Without a file it is a folder that happens to have the name, as the one that `wandb` writes to.
    return spec is not None and spec.origin is not None


class _TensorBoard:
    """Writes event files into `tensorboard` in the run's folder."""

    def __init__(self, run: Run) -> None:
        folder = run.folder
        if folder is None:  # no launcher of ours made one
            folder = Path("shoestring-runs") / f"{run.name}-{time.strftime('%Y%m%d-%H%M%S')}"
        module = next(filter(_is_installed, _WRITERS))
        library: Any = importlib.import_module(
            "torch.utils.tensorboard" if module == "tensorboard" else module
        )
        self._writer = library.SummaryWriter(str(folder / "tensorboard"))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(PREFIX + name, value, step)

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    """Logs to a run of a library with the interface of Weights & Biases."""

    def __init__(self, run: Run, library: Any, current: Any) -> None:
        self._is_own = current is None
        if current is None:
            project = os.environ.get(f"{library.__name__.upper()}_PROJECT") or "shoestring"
            config = {"workers": run.workers, "codec": run.codec or None, "policy": run.policy or None}
            current = library.init(project=project, name=run.name, config=config)
        self._run = current
        if hasattr(current, "define_metric"):  # else a script's own steps would be the axis
            current.define_metric(_STEP, hidden=True)
            current.define_metric(PREFIX + "*", step_metric=_STEP)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({_STEP: step, **{PREFIX + name: value for name, value in values.items()}})

    def close(self) -> None:
        if self._is_own:
            self._run.finish()


def _open_wandb(run: Run) -> Tracker:
    library: Any = importlib.import_module("wandb")
    return _Wandb(run, library, library.run)


def _open_trackio(run: Run) -> Tracker:
    library: Any = importlib.import_module("trackio")
    current = getattr(getattr(library, "context_vars", library), "current_run", None)
    return _Wandb(run, library, None if current is None else current.get())


# The libraries that do, by preference, and what opens a page.
_TRACKERS: dict[str, tuple[tuple[str, ...], Callable[[Run], Tracker]]] = {
    "tensorboard": (_WRITERS, _TensorBoard),
    "wandb": (("wandb",), _open_wandb),
    "trackio": (("trackio",), _open_trackio),
}
