"""The buckets that codecs are measured on: captured gradients, and made-up ones.

`conv` and `gpt` are the gradients of the last step of a training, `conv-3` those of
its third, as early and late gradients differ much. A capture takes minutes, so it is
kept: as safetensors, in the user's cache folder, under a name that changes with
whatever decides its values. A file there that cannot be read is written anew.
"""

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from shoestring.bench import data
from shoestring.bench.recipe import FULL, QUICK, Progress, Recipe
from shoestring.codec.base import Layout, Vector
from shoestring.errors import ShoestringError, UsageError

SYNTHETIC_MB = 16
QUICK_NAMES = ("conv", "gpt")
_SEED = 2026


@dataclass(frozen=True)
class Bucket:
    """All tensors of one step, end to end, and what they are called."""

    name: str
    layout: Layout
    values: Vector

    @classmethod
    def of(cls, name: str, tensors: list[NDArray[np.float32]]) -> "Bucket":
        parts = [np.empty(0, np.float32), *(tensor.reshape(-1) for tensor in tensors)]
        return cls(name, Layout.of(tensor.shape for tensor in tensors), np.concatenate(parts))

    def repeated(self, size_mb: float) -> "Bucket":
        """Repeat all tensors until the bucket has that many MB at least."""
        times = max(1, -int(-size_mb * 1e6 // max(self.values.nbytes, 1)))
        return Bucket(self.name, Layout(self.layout.shapes * times), np.tile(self.values, times))


def names(quick: bool) -> list[str]:
    """List every set of gradients."""
    recipes = QUICK if quick else FULL
    captured = [
        model if step == recipe.steps else f"{model}-{step}"
        for model, recipe in recipes.items()
        for step in recipe.captures[::-1]
    ]
    return [*captured, *_SYNTHETIC]


def is_captured(name: str) -> bool:
    return name not in _SYNTHETIC


def load(
    name: str,
    *,
    quick: bool = False,
    size_mb: float | None = None,
    folder: Path | None = None,
    progress: Progress = lambda what, done, total: None,
) -> Bucket:
    """Return one set of gradients; capture it first, where that has not been done yet."""
    if name in _SYNTHETIC:
        return _synthesise(name, size_mb or SYNTHETIC_MB)
    if name not in names(quick):
        raise UsageError(f"there are no gradients `{name}`", hint=f"one of {', '.join(names(quick))}")
    model, _, step = name.partition("-")
    recipe = (QUICK if quick else FULL)[model]
    label, tensors = captured(recipe, int(step or recipe.steps), folder, progress)
    bucket = Bucket.of(f"{label}-{step}" if step else label, tensors)
    return bucket.repeated(size_mb) if size_mb else bucket


def captured(
    recipe: Recipe, step: int, folder: Path | None, progress: Progress
) -> tuple[str, list[NDArray[np.float32]]]:
    """Return what to call a capture (its data show in it) and the tensors of one of its steps."""
    if recipe.model == "conv":
        images = data.load_images(folder)
        label = "conv" if images.source == "fashion-mnist" else f"conv-{images.source}"
        file = cache_folder() / f"{label}-{recipe.digest(images.pixels, images.labels)}.safetensors"
    else:
        text = data.load_text()
        label = recipe.model
        file = cache_folder() / f"{label}-{recipe.digest(text)}.safetensors"

    prefix = f"{step}/"
    tensors = _read(file)
    if not any(key.startswith(prefix) for key in tensors):
        training = _import_training()
        if recipe.model == "conv":
            steps = training.capture_conv(recipe, images, progress)
        else:
            steps = training.capture_gpt(recipe, text, progress)
        tensors = {
            f"{taken}/{index:04d}/{name}": gradient
            for taken, gradients in steps.items()
            for index, (name, gradient) in enumerate(gradients)
        }
        _write(file, tensors)
    return label, [tensors[key] for key in sorted(tensors) if key.startswith(prefix)]


def cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "shoestring" / "gradients"


def _import_training() -> ModuleType:
    # Threads that wait without spinning: much faster where something else runs too.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        from shoestring.bench.codec import training
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ShoestringError(
            "gradients are captured from a training, and torch is not installed",
            hint="`pip install 'shoestring[torch]'`, or measure `--gradients gaussian,laplace`",
        ) from None
    return training


def _read(file: Path) -> dict[str, NDArray[np.float32]]:
    try:
        return load_file(file) if file.is_file() else {}
    except (OSError, SafetensorError):
        return {}


def _write(file: Path, tensors: dict[str, NDArray[np.float32]]) -> None:
    """Write under a temporary name first: nobody ever reads half a file."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent) as folder:
            save_file(tensors, Path(folder) / file.name)
            (Path(folder) / file.name).replace(file)
    except OSError as error:
        raise ShoestringError(
            f"`{file}` cannot be written: {error}", hint="set XDG_CACHE_HOME to a folder that you can write"
        ) from None


def _shapes(values: int) -> list[tuple[int, ...]]:
    """Tensors as models have them, some of odd sizes: `values` in all."""
    side = max(1, int((values / 18) ** 0.5))
    shapes: list[tuple[int, ...]] = [(side, side, 3, 3), (values // 4 // 1001, 1001), (257,), (63,), (1,)]
    rest = values - Layout.of(shapes).total
    return [*shapes, (max(rest, 0),)]


def _gaussian(size: int, rng: np.random.Generator) -> Vector:
    return rng.standard_normal(size, np.float32) * np.float32(10 ** rng.uniform(-4, 0))


def _laplace(size: int, rng: np.random.Generator) -> Vector:
    return (rng.laplace(size=size) * 10 ** rng.uniform(-4, 0)).astype(np.float32)


def _dense(size: int, rng: np.random.Generator) -> Vector:
    return rng.choice(np.array([-1, 1], np.float32), size)


_SYNTHETIC: dict[str, Callable[[int, np.random.Generator], Vector]] = {
    "gaussian": _gaussian,
    "laplace": _laplace,
    "zeros": lambda size, rng: np.zeros(size, np.float32),
    "dense": _dense,
}


def _synthesise(name: str, size_mb: float) -> Bucket:
    rng = np.random.default_rng(_SEED)
    shapes = _shapes(int(size_mb * 1e6) // 4)
    make = _SYNTHETIC[name]
    return Bucket.of(name, [make(int(np.prod(shape)), rng).reshape(shape) for shape in shapes])
