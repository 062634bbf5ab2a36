"""The files of a checkpoint: a folder that is either complete and undamaged, or not used.

`ROOT/step-000000200/` holds one tensor file per shard, one per worker, and
`manifest.json`, which is written last: a checkpoint is complete when its
manifest is there. The manifest names every file with its size and the digests
of its parts, and ends in a digest of itself, so every byte of a checkpoint is
covered and any change to one of them is found and named.

A tensor's name is unique in its checkpoint and says nothing about the file it
lies in: a restore on another number of shards reads each part from whichever
file holds it.

What must stay true: nothing here writes to or removes the newest complete
checkpoint, and nothing is removed that was not written here.
"""

import hashlib
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from numpy.typing import NDArray

from shoestring import __version__
from shoestring.checkpoint.tensorfile import (
    MAX_JSON_BYTES,
    PARTIAL,
    REPORT,
    FileRecord,
    PartialFile,
    Size,
    TensorFile,
    TensorFileWriter,
    TensorRecord,
    damaged,
    disk_error,
    open_plain,
    sync_folder,
)
from shoestring.errors import SnapshotError, UsageError

__all__ = [
    "FileRecord", "Manifest", "Snapshot", "TensorFileWriter", "TensorRecord",
    "commit", "discard", "newest", "prune", "read_manifest", "step_folder",
]  # fmt: skip

FORMAT = 1
MANIFEST = "manifest.json"

_STEP_FOLDER = re.compile(r"step-([0-9]{9,18})")
_TAIL = re.compile(rb',"digest":"([0-9a-f]{64})"}\n')
_TAIL_BYTES = len(',"digest":""}\n') + 64
Version = Annotated[str, Meta(pattern=r"\A[0-9A-Za-z.+-]{1,64}\Z")]


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a complete checkpoint holds. `facts` are JSON data about the run as a whole."""

    format: int = FORMAT
    shoestring: Version = __version__
    step: Size
    workers: Size
    shards: Size
    facts: dict[str, Any]
    files: list[FileRecord]


class Snapshot:
    """A complete checkpoint: all its files are there with their sizes.

    A tensor's bytes are checked when they are read, or all at once by `verify`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = read_manifest(folder)
        for record in self.manifest.files:
            _check_size(folder, record)
        self._records = {record.name: record for record in self.manifest.files}
        self._homes = {tensor.name: file.name for file in self.manifest.files for tensor in file.tensors}
        self._opened: dict[str, TensorFile] = {}

    def names(self) -> dict[str, str]:
        """Say which file holds each tensor."""
        return dict(self._homes)

    def has(self, name: str) -> bool:
        """Say whether there is a tensor of that name."""
        return name in self._homes

    def spec(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Say a tensor's dtype and shape: compare them before `read`, which allocates what they need."""
        entry = self._file_of(name).entries[name]
        return entry.dtype.name, entry.shape

    def read(self, name: str) -> NDArray[Any]:
        """Read a tensor into memory of its own; its digest is checked before it is returned."""
        return self._file_of(name).read(name)

    def verify(self) -> None:
        """Check every byte of every file."""
        for record in self.manifest.files:
            TensorFile(self.folder / record.name, record).verify()

    def _file_of(self, name: str) -> TensorFile:
        home = self._homes.get(name)
        if home is None:
            raise SnapshotError(
                f"`{self.folder}` has no tensor `{name}`", hint="restore a checkpoint of the same model"
            )
        if home not in self._opened:
            self._opened[home] = TensorFile(self.folder / home, self._records[home])
        return self._opened[home]


def step_folder(root: Path, step: int) -> Path:
    """Name the folder of a step's checkpoint."""
    return root / f"step-{step:09d}"


def commit(folder: Path, manifest: Manifest) -> None:
    """Make a checkpoint complete. Every file must be finished; afterwards all of it is on disk."""
    path = folder / MANIFEST
    try:
        text = msgspec.json.encode(manifest)[:-1]
        text += b',"digest":"%s"}\n' % hashlib.sha256(text).hexdigest().encode()
        if len(text) > MAX_JSON_BYTES:
            raise ValueError(f"it has {len(text)} bytes, the most is {MAX_JSON_BYTES}")
        # JSON has no tuples, no NaN and no numbers as keys: refuse what would come back as something else.
        if _parse_manifest(text, folder) != manifest:
            raise ValueError("its facts are not JSON data")
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise SnapshotError(f"`{path}` cannot be written: {error}", hint=REPORT) from error
    for record in manifest.files:
        _check_size(folder, record)
    file = PartialFile(path)
    file.write(text, 0)
    file.publish()
    try:
        sync_folder(folder.parent)
    except OSError as error:
        raise disk_error(f"`{folder}` cannot be written", error) from error


def read_manifest(folder: Path) -> Manifest:
    """Read what a complete checkpoint holds; its other files are not looked at."""
    path = folder / MANIFEST
    with open_plain(path) as (descriptor, size):
        if size > MAX_JSON_BYTES:
            raise damaged(path, f"has {size} bytes, the most is {MAX_JSON_BYTES}")
        text = os.pread(descriptor, size, 0)
    try:
        return _parse_manifest(text, folder)
    except (ValueError, RecursionError) as error:  # msgspec's errors are `ValueError`s, too
        raise damaged(path, f"is not a whole manifest: {error}") from error


def newest(root: Path, *, verify: bool = True) -> tuple[Snapshot | None, list[SnapshotError]]:
    """Find the newest complete and undamaged checkpoint, and say why newer ones were passed over."""
    passed_over: list[SnapshotError] = []
    for folder in _step_folders(root):
        try:
            snapshot = Snapshot(folder)
            if verify:
                snapshot.verify()
        except SnapshotError as error:
            passed_over.append(error)
        else:
            return snapshot, passed_over
    return None, passed_over


def prune(root: Path, retain: int) -> list[Path]:
    """Retain the newest `retain` complete checkpoints; remove older ones and what abandoned attempts left.

    An attempt newer than the newest complete checkpoint may still be under way and stays. So does a
    checkpoint whose manifest or sizes are wrong: it is not ours to judge what can be saved of it.
    """
    if retain < 1:
        raise UsageError(f"cannot keep {retain} checkpoints", hint="keep 1 or more")
    complete: list[Path] = []
    removed: list[Path] = []
    for folder in _step_folders(root):
        is_abandoned = bool(complete) and not os.path.lexists(folder / MANIFEST)
        if not is_abandoned:
            try:
                Snapshot(folder)
            except SnapshotError:
                continue
            complete.append(folder)
        if is_abandoned or len(complete) > retain:
            _remove(folder)
            removed.append(folder)
        else:
            removed += _remove_files(folder, (PARTIAL,))
    return removed


def discard(folder: Path) -> None:
    """Remove what a failed attempt left in a step's folder; a folder with a manifest stays as it is."""
    if _STEP_FOLDER.fullmatch(folder.name) and folder.is_dir() and not os.path.lexists(folder / MANIFEST):
        _remove(folder)


class _Origin(msgspec.Struct):
    """What the manifest of any format says."""

    format: int
    shoestring: Version


def _parse_manifest(text: bytes, folder: Path) -> Manifest:
    """Read a manifest; a `ValueError` says what is wrong with it."""
    origin = msgspec.json.decode(text, type=_Origin)
    if origin.format != FORMAT:
        raise SnapshotError(
            f"`{folder / MANIFEST}` has format {origin.format}, written by shoestring {origin.shoestring}; "
            f"this is shoestring {__version__}, which reads format {FORMAT}",
            hint=f"restore it with shoestring {origin.shoestring}, or restore a checkpoint of this version",
        )
    body, tail = text[:-_TAIL_BYTES], _TAIL.fullmatch(text[-_TAIL_BYTES:])
    if tail is None or tail[1] != hashlib.sha256(body).hexdigest().encode():
        raise ValueError("its SHA-256 is not that at its end")
    manifest = msgspec.json.decode(body + b"}", type=Manifest)
    _refuse_repeats("file", [file.name for file in manifest.files])
    _refuse_repeats("tensor", [tensor.name for file in manifest.files for tensor in file.tensors])
    if _STEP_FOLDER.fullmatch(folder.name) and folder.name != step_folder(folder, manifest.step).name:
        raise ValueError(f"it is of step {manifest.step}, its folder is `{folder.name}`")
    return manifest


def _refuse_repeats(kind: str, names: list[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ValueError(f"{kind} `{name}` is there twice")
        seen.add(name)


def _check_size(folder: Path, record: FileRecord) -> None:
    path = folder / record.name
    with open_plain(path) as (_, size):
        if size != record.size:
            raise damaged(path, f"has {size} bytes, expected {record.size}")


def _step_folders(root: Path) -> list[Path]:
    """The folders of steps, newest first; links are not followed."""
    try:
        with os.scandir(root) as entries:
            names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise disk_error(f"`{root}` cannot be read", error) from error
    steps = [int(match[1]) for match in map(_STEP_FOLDER.fullmatch, names) if match]
    folders = [step_folder(root, step) for step in sorted(set(steps), reverse=True)]
    return [folder for folder in folders if folder.name in names]


def _remove(folder: Path) -> None:
    """Remove a checkpoint's files, and the folder if nothing else is in it."""
    try:
        with suppress(FileNotFoundError):
            os.unlink(folder / MANIFEST)  # first: what is half removed must not look complete
            sync_folder(folder)
        _remove_files(folder, (".safetensors", PARTIAL))
        if not os.listdir(folder):
            os.rmdir(folder)
    except OSError as error:
        raise disk_error(f"`{folder}` cannot be removed", error) from error


def _remove_files(folder: Path, endings: tuple[str, ...]) -> list[Path]:
    path = folder
    try:
        paths = [folder / name for name in sorted(os.listdir(folder)) if name.endswith(endings)]
        for path in paths:
            os.unlink(path)
    except OSError as error:
        raise disk_error(f"`{path}` cannot be removed", error) from error
    return paths
