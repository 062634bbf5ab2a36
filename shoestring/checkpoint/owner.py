"""Who may complete and remove the checkpoints of a folder: the run that took it over last.

A launcher that starts a run again cannot be sure that every process of the run before is dead: a
host that does not answer may only be slow. So it takes the folder over before it looks for the
checkpoint to go on from. From then on what is left of the run before completes and removes
nothing there.
"""

import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shoestring.checkpoint.tensorfile import disk_error
from shoestring.errors import SnapshotError

_FILE = "owner"
_MOST_BYTES = 64


def take_over(root: Path) -> None:
    """Write a new owner: runs that have read the former one complete no more checkpoints here."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _locked(root) as file:
            os.ftruncate(file, 0)
            os.pwrite(file, secrets.token_hex(16).encode(), 0)
            os.fsync(file)
    except OSError as error:
        raise disk_error(f"`{root}` cannot be taken over", error) from error


def read_owner(root: Path) -> str:
    """The mark of the run that owns a folder; empty if none has taken it over."""
    try:
        with (root / _FILE).open("rb") as file:
            return file.read(_MOST_BYTES).decode("ascii", "replace")
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise disk_error(f"`{root / _FILE}` cannot be read", error) from error


@contextmanager
def owned(root: Path, owner: str) -> Iterator[None]:
    """Do something to the folder as its owner; nobody takes it over meanwhile."""
    with _locked(root) as file:
        if os.pread(file, _MOST_BYTES, 0).decode("ascii", "replace") != owner:
            raise SnapshotError(
                f"another run has taken over `{root}`",
                hint="end this one, or give it another folder with `--checkpoint`",
            )
        yield


@contextmanager
def _locked(root: Path) -> Iterator[int]:
    file = os.open(root / _FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file
    finally:
        os.close(file)
