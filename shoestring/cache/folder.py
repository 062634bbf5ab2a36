"""The folder in the host's memory where all jobs keep decoded samples, and who may take how much.

Every dataset has a folder of its own in it. What the datasets have reserved is never more
than the limit, half of the memory unless told otherwise; a dataset reserves before it grows.

A dataset is in use while any process holds a shared lock on its file `jobs`; the kernel lets
go of it when a process ends, however that comes about. When there is no room left, datasets
that nobody uses are dropped whole, the one that was opened longest ago first. One in use is
never dropped, and never made smaller.

Everything here happens under one lock, which is waited for with a bound. A process that is
killed in between leaves folders whose names begin with a dot; the next one removes them.
"""

import fcntl
import hashlib
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from shoestring.cache.patience import attempts
from shoestring.cache.samples import FORMAT
from shoestring.errors import FleetError, UsageError

VARIABLE = "SHOESTRING_CACHE"
LIMIT_VARIABLE = "SHOESTRING_CACHE_LIMIT"
LEAST_BYTES = 1 << 20  # an empty database and its slack must fit in
MOST_READERS = 2048  # at the same time, of one dataset

_MEMORY = Path("/dev/shm")
_STEP_BYTES = 16 << 20
_PAGE_BYTES = 4096
_LOCK_TIMEOUT_S = 30.0
_LONGEST_PAUSE_S = 0.001
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_UNITS |= {"KI": 1 << 10, "MI": 1 << 20, "GI": 1 << 30, "TI": 1 << 40}


class About(msgspec.Struct, frozen=True):
    """Which dataset a folder belongs to, and what it has reserved."""

    name: str
    version: str
    length: int
    boot: str = ""  # a database that was not synced is worth nothing after the machine stopped
    map_bytes: int = 0  # as far as the database can ever grow: alike in all processes
    reserved_bytes: int = 0

    @property
    def folder(self) -> str:
        """The name of the dataset's folder."""
        key = msgspec.msgpack.encode([FORMAT, self.name, self.version, self.length])
        return hashlib.blake2b(key, digest_size=16).hexdigest()


@dataclass(frozen=True)
class Entry:
    """One dataset as `CacheFolder.entries` finds it."""

    about: About
    used_bytes: int
    is_used: bool


class CacheFolder:
    """All datasets of this user on this host."""

    def __init__(self, path: Path, limit_bytes: int) -> None:
        self.path = path
        self.limit_bytes = limit_bytes

    @classmethod
    def default(cls, path: Path | None = None) -> "CacheFolder":
        """The folder given, of $SHOESTRING_CACHE, or this user's in shared memory; made if it is missing."""
        named = path or os.environ.get(VARIABLE)
        place = Path(named) if named else _MEMORY / f"shoestring-cache-{os.getuid()}"
        _make_private(place)
        limit = os.environ.get(LIMIT_VARIABLE)
        return cls(place, read_size(limit) if limit else _half_of_memory(place))

    def path_of(self, about: About) -> Path:
        """Where a dataset's files are."""
        return self.path / about.folder

    def open(self, wanted: About) -> tuple[About, int]:
        """Return what is known of a dataset and the open file whose lock says that it is in use."""
        path = self.path_of(wanted)
        with self._lock():
            about = _read(path)
            if about is None or about.boot != _boot():
                self._drop(path)
                about = self._create(wanted)
            jobs = os.open(path / "jobs", os.O_RDWR | os.O_CLOEXEC)
            fcntl.flock(jobs, fcntl.LOCK_SH)
            os.utime(jobs)
        return about, jobs

    def reserve(self, wanted: About, size_bytes: int, budget_bytes: int | None) -> int:
        """Let a dataset grow to a size; return how large it may be, which is less if there is no room.

        One with a budget gets up to that. One without stops when it has as much as is left
        for others.
        """
        path = self.path_of(wanted)
        with self._lock():
            about = _read(path)
            if about is None:
                raise FleetError(f"`{path}` is gone", hint="use `shoestring fleet cache clear` to remove it")
            most = min(about.map_bytes, budget_bytes or about.map_bytes)
            if size_bytes <= about.reserved_bytes or size_bytes > most:
                return about.reserved_bytes
            goal = min(-(-size_bytes // self._step) * self._step, most)
            idle = sorted(self._idle(path), key=lambda other: (other / "jobs").stat().st_mtime_ns)
            while (free := self._free(path, budget_bytes)) < goal and idle:
                self._drop(idle.pop(0))
            granted = min(goal, free)
            if granted < size_bytes:
                return about.reserved_bytes
            _write(path, msgspec.structs.replace(about, reserved_bytes=granted))
            return granted

    def entries(self) -> list[Entry]:
        """All datasets, by name."""
        with self._lock():
            found = [
                Entry(about, (path / "data.mdb").stat().st_size, not _is_idle(path))
                for path, about in self._all()
            ]
        return sorted(found, key=lambda entry: (entry.about.name, entry.about.version, entry.about.length))

    def drop(self, about: About) -> bool:
        """Remove a dataset; False if a process uses it."""
        path = self.path_of(about)
        with self._lock():
            if not _is_idle(path):
                return False
            self._drop(path)
            return True

    @property
    def _step(self) -> int:
        return max(_PAGE_BYTES, min(_STEP_BYTES, self.limit_bytes // 16))

    def _free(self, path: Path, budget_bytes: int | None) -> int:
        """What one dataset may have in all."""
        others = sum(about.reserved_bytes for other, about in self._all() if other != path)
        free = max(0, self.limit_bytes - others)
        return free if budget_bytes else free // 2

    def _idle(self, path: Path) -> list[Path]:
        return [other for other, _ in self._all() if other != path and _is_idle(other)]

    def _all(self) -> Iterator[tuple[Path, About]]:
        for path in sorted(self.path.iterdir()):
            if path.is_dir() and (about := _read(path)) is not None:
                yield path, about

    def _create(self, wanted: About) -> About:
        import lmdb

        made = self.path / f".{secrets.token_hex(8)}"
        made.mkdir(0o700)
        (made / "jobs").touch(0o600)
        (made / "claims").touch(0o600)
        map_bytes = self.limit_bytes // _PAGE_BYTES * _PAGE_BYTES
        about = msgspec.structs.replace(wanted, boot=_boot(), map_bytes=map_bytes)
        _write(made, about)
        # Begun before it has its name: a database whose first pages were cut off would never open.
        lmdb.open(str(made), map_size=map_bytes, mode=0o600, sync=False, max_readers=MOST_READERS).close()
        made.rename(self.path_of(about))
        return about

    def _drop(self, path: Path) -> None:
        gone = self.path / f".{secrets.token_hex(8)}"
        with suppress(FileNotFoundError):
            path.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)

    @contextmanager
    def _lock(self) -> Iterator[None]:
        descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if not any(_try_lock(descriptor) for _ in attempts(_LOCK_TIMEOUT_S, _LONGEST_PAUSE_S)):
                raise FleetError(
                    f"`{self.path / 'lock'}` has been held for {_LOCK_TIMEOUT_S:g} s",
                    hint=f"look for a stopped process that holds it, or set {VARIABLE} to another folder",
                )
            for left in self.path.glob(".*"):
                shutil.rmtree(left, ignore_errors=True)
            yield
        finally:
            # Said outright: a child that was forked meanwhile has the file open as well.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)


def read_size(size: int | str) -> int:
    """Read a number of bytes, like `4000000`, `"500MB"` or `"2GiB"`."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([A-Z]*)", str(size).strip().upper())
    unit = _UNITS.get(found[2].removesuffix("B")) if found else None
    if found is None or unit is None:
        raise UsageError(f"`{size}` is no size", hint='give bytes, or text like "500MB" or "2GiB"')
    size_bytes = int(float(found[1]) * unit)
    if size_bytes < LEAST_BYTES:
        raise UsageError(f"`{size}` is less than a cache needs", hint=f"give at least {LEAST_BYTES} bytes")
    return size_bytes


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_idle(path: Path) -> bool:
    try:
        descriptor = os.open(path / "jobs", os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    try:
        return _try_lock(descriptor)
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _read(path: Path) -> About | None:
    try:
        return msgspec.json.decode((path / "about.json").read_bytes(), type=About)
    except (FileNotFoundError, msgspec.MsgspecError, UnicodeDecodeError):
        return None


def _write(path: Path, about: About) -> None:
    new = path / "about.new"
    new.touch(0o600)
    new.write_bytes(msgspec.json.encode(about))
    new.rename(path / "about.json")


def _make_private(path: Path) -> None:
    try:
        path.mkdir(0o700, exist_ok=True)
        found = path.lstat()
    except OSError as error:
        raise FleetError(
            f"`{path}` cannot be used: {error.strerror}", hint=f"set {VARIABLE} to another folder"
        ) from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise FleetError(
            f"`{path}` is not a folder that belongs to you alone",
            hint=f"`chmod 700` it, or set {VARIABLE} to another folder",
        )


def _half_of_memory(path: Path) -> int:
    system = os.statvfs(path)
    sizes = [system.f_blocks * system.f_frsize, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    with suppress(OSError, ValueError):  # without a control group, or one that says `max`
        sizes.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return max(LEAST_BYTES, min(sizes) // 2)


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
