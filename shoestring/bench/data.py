"""What the models train on whose gradients are measured: images, and Python source.

Nothing is downloaded. Images are Fashion-MNIST where its IDX files are at hand: in
a folder that is named, or where Debian's `dataset-fashion-mnist` puts them. Failing
that, the digits that scikit-learn carries, scaled up; their name says so.
"""

import gzip
import math
import os
import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np
from numpy.typing import NDArray

from shoestring.errors import UsageError

VARIABLE = "SHOESTRING_DATA"
DEBIAN = Path("/usr/share/datasets/fashion-mnist")
SIDE = 28
_CLASSES = 10

Part = Literal["train", "t10k"]

_IDX_BYTES = 0x08  # the one element type these files have
_MAX_BYTES = 1 << 30
_HINT = "name a folder with Fashion-MNIST's IDX files, or install Debian's `dataset-fashion-mnist`"


@dataclass(frozen=True)
class Images:
    """Grey pictures with a class each."""

    source: str  # `fashion-mnist` or `digits`
    pixels: NDArray[np.uint8]  # [n, 28, 28]
    labels: NDArray[np.uint8]  # [n]


def load_images(folder: Path | None = None, part: Part = "train") -> Images:
    """Load images: of `folder`, of $SHOESTRING_DATA, of Debian, or the digits, which have one part."""
    named = folder or Path(os.environ[VARIABLE]) if folder or os.environ.get(VARIABLE) else None
    if named is not None:
        return read_fashion_mnist(named, part)
    return read_fashion_mnist(DEBIAN, part) if DEBIAN.is_dir() else load_digits()


def read_fashion_mnist(folder: Path, part: Part = "train") -> Images:
    """Read a part of Fashion-MNIST, compressed or not; `t10k` is the one to test with."""
    pixels = read_idx(_find(folder, f"{part}-images-idx3-ubyte"))
    labels = read_idx(_find(folder, f"{part}-labels-idx1-ubyte"))
    if pixels.shape[1:] != (SIDE, SIDE) or labels.shape != pixels.shape[:1] or not labels.size:
        raise UsageError(
            f"`{folder}` has images of shape {pixels.shape} and labels of shape {labels.shape}, "
            f"expected (n, {SIDE}, {SIDE}) and (n,)",
            hint=_HINT,
        )
    if labels.max() >= _CLASSES:
        raise UsageError(f"`{folder}` has a label {labels.max()}, expected 0 to 9", hint=_HINT)
    return Images("fashion-mnist", pixels, labels)


def load_digits() -> Images:
    """Load scikit-learn's 8 x 8 digits, each pixel made 3 x 3 of them and framed to 28 x 28."""
    try:
        from sklearn.datasets import load_digits as load
    except ImportError:
        raise UsageError(
            "there is no Fashion-MNIST here, and no scikit-learn, whose digits would serve",
            hint=f"{_HINT}, or `pip install 'shoestring[bench]'`",
        ) from None
    digits = load()
    large = (digits.images * 15).astype(np.uint8).repeat(3, axis=1).repeat(3, axis=2)
    pixels = np.pad(large, ((0, 0), (2, 2), (2, 2)))
    return Images("digits", pixels, digits.target.astype(np.uint8))


def read_idx(path: Path) -> NDArray[np.uint8]:
    """Read one IDX file of bytes; one that is damaged or of another kind is refused."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            return _read_idx(file, path)
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(f"`{path}` cannot be read: {error}", hint=_HINT) from None


def _read_idx(file: BinaryIO | gzip.GzipFile, path: Path) -> NDArray[np.uint8]:
    magic = file.read(4)
    if len(magic) < 4 or magic[:2] != b"\0\0" or magic[2] != _IDX_BYTES or not 1 <= magic[3] <= 3:
        raise UsageError(f"`{path}` begins with `{magic.hex()}`: not an IDX file of bytes", hint=_HINT)
    sides = file.read(4 * magic[3])
    if len(sides) < 4 * magic[3]:
        raise UsageError(f"`{path}` ends within its header", hint=_HINT)
    shape = tuple(np.frombuffer(sides, ">u4").tolist())
    size = math.prod(shape)
    if size > _MAX_BYTES:
        raise UsageError(f"`{path}` says it holds {size} values, more than {_MAX_BYTES}", hint=_HINT)
    body = file.read(size + 1)
    if len(body) != size:
        found = "more" if len(body) > size else str(len(body))
        raise UsageError(f"`{path}` has {found} values where its header says {size}", hint=_HINT)
    return np.frombuffer(body, np.uint8).reshape(shape)


def _find(folder: Path, name: str) -> Path:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    raise UsageError(f"`{folder}` has neither `{name}` nor `{name}.gz`", hint=_HINT)


def load_text(most_bytes: int = 4 << 20) -> NDArray[np.uint8]:
    """Load the Python standard library's own source, up to a size: a text every machine has."""
    folder = Path(sysconfig.get_path("stdlib"))
    parts, size = [], 0
    for file in sorted(folder.glob("*.py")):
        parts.append(file.read_bytes())
        size += len(parts[-1])
        if size >= most_bytes:
            break
    if size < 1 << 16:
        raise UsageError(
            f"`{folder}` holds {size} bytes of Python source, too few to train on",
            hint="use a Python that comes with its standard library's source",
        )
    return np.frombuffer(b"".join(parts)[:most_bytes], np.uint8)
