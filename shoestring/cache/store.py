"""One dataset's decoded samples, in an LMDB database that all processes of the host share.

Promises. A sample is stored whole or not at all, whenever a process is killed: LMDB writes new
pages and then one page that points to them. The database is never larger than what was
reserved for it: all writers take turns, and one that cannot be sure of its room does not
write. Nothing here is waited for without a bound.

Samples that are stored stay: every epoch wants every sample once, so making room for one by
throwing out another of the same dataset gains nothing, and throwing out the oldest would
throw out just what is wanted next.

Claims and turns are locks on bytes of the file `claims`, which the kernel lets go of when
their process ends. They belong to a process, so threads keep books beside them.

An LMDB environment must not cross a fork: it is closed before one and opened anew after it, on
either side. What is open is known by its folder, as one process may open it once only, and
closing a second descriptor of `claims` would let go of all locks.
"""

import fcntl
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from shoestring.cache.folder import MOST_READERS, VARIABLE, About, CacheFolder
from shoestring.cache.patience import attempts
from shoestring.errors import FleetError, UsageError

if TYPE_CHECKING:
    import lmdb

_TURN = 1 << 62  # the byte whose lock is the right to write; samples have the bytes before it
_TURN_TIMEOUT_S = 5.0
_FULL_S = 5.0  # before it is asked again whether there is room
_LONGEST_PAUSE_S = 0.002
_MOST_BYTES = 1 << 31  # a sample; LMDB's own bound is about twice that
_ENTRY_BYTES = 32  # a key and what describes it
_SLACK_PAGES = 32  # what one write may need besides the sample: the path to it, split, and the free list


class Store:
    """Samples by their index. Make one with `open_store`; any thread may use it."""

    def __init__(self, folder: CacheFolder, about: About) -> None:
        self._folder = folder
        self._path = folder.path_of(about)
        self.about, self._jobs = folder.open(about)
        self._claims = os.open(self._path / "claims", os.O_RDWR | os.O_CLOEXEC)
        self._reserved = 0
        self._full_until = 0.0
        self._environment: lmdb.Environment | None = None
        self.forget_threads()

    def get(self, index: int) -> bytearray | None:
        """Return a copy of what is stored, or None."""
        import lmdb

        try:
            with self._lock, self._open().begin(buffers=True) as reading:
                found = reading.get(_key(index))
                return None if found is None else bytearray(found)
        except lmdb.Error:  # whatever is wrong there, the dataset still has the sample
            return None

    def put(self, index: int, encoded: bytearray, budget_bytes: int | None = None) -> bool:
        """Store a sample; False if there is no room, or no turn in time."""
        import lmdb

        if self.is_full or len(encoded) > _MOST_BYTES:
            return False
        with self._turn() as is_mine:
            if not is_mine:
                return False
            try:
                with self._lock:
                    environment = self._open()
                    if self._has_room(environment, len(encoded), budget_bytes):
                        with environment.begin(write=True) as writing:
                            writing.put(_key(index), encoded)
                        return True
            except (lmdb.Error, FleetError, OSError):
                pass  # memory is short, or the folder is locked: the job goes on without
            self._full_until = time.monotonic() + _FULL_S
            return False

    @property
    def is_full(self) -> bool:
        """Whether there was no room a moment ago."""
        return time.monotonic() < self._full_until

    @contextmanager
    def claim(self, index: int) -> Iterator[bool]:
        """Take the right to decode a sample, for the time of the block; False if another has it."""
        is_mine = self._take(index)
        try:
            yield is_mine
        finally:
            if is_mine:
                self._release(index)

    def count(self) -> int:
        """How many samples are stored."""
        with self._lock:
            return int(self._open().stat()["entries"])

    def close(self) -> None:
        """Let go of it; from now on the dataset may be dropped."""
        with self._lock:
            self.close_environment()
            os.close(self._claims)
            os.close(self._jobs)

    def pause(self) -> None:
        """Before a fork: wait for threads to leave, and close what must not cross it."""
        self._lock.acquire()
        self.close_environment()

    def go_on(self) -> None:
        """After a fork, in the parent."""
        self._lock.release()

    def forget_threads(self) -> None:
        """After a fork, in the child: its threads and claims stayed behind."""
        self._lock = threading.Lock()
        self._books = threading.Lock()
        self._held: set[int] = set()

    def close_environment(self) -> None:
        if self._environment is not None:
            self._environment.close()
            self._environment = None

    def _open(self) -> "lmdb.Environment":
        if self._environment is None:
            import lmdb

            # Not `writemap`: where memory runs out, a write would end the process instead of failing.
            # Not synced: what a killed process has written stays, and the machine's end takes all of it.
            self._environment = lmdb.open(
                str(self._path),
                map_size=self.about.map_bytes,
                mode=0o600,
                create=False,
                sync=False,
                metasync=False,
                readahead=False,
                meminit=False,
                max_readers=MOST_READERS,
            )
            self._environment.reader_check()  # places of readers that were killed
        return self._environment

    def _has_room(self, environment: "lmdb.Environment", size: int, budget_bytes: int | None) -> bool:
        page_bytes = environment.stat()["psize"]
        used = environment.info()["last_pgno"] + 1 + _SLACK_PAGES
        wanted = page_bytes * (used + -(-(size + _ENTRY_BYTES) // page_bytes))
        if budget_bytes is not None and wanted > budget_bytes:
            return False
        if wanted > self._reserved:
            environment.reader_check()  # a killed reader keeps pages from being used again
            self._reserved = self._folder.reserve(self.about, wanted, budget_bytes)
        return wanted <= self._reserved

    @contextmanager
    def _turn(self) -> Iterator[bool]:
        """Take the turn to write. LMDB's own lock has no bound: a stopped process would stop all."""
        is_mine = any(self._take(_TURN) for _ in attempts(_TURN_TIMEOUT_S, _LONGEST_PAUSE_S))
        try:
            yield is_mine
        finally:
            if is_mine:
                self._release(_TURN)

    def _take(self, byte: int) -> bool:
        with self._books:
            if byte in self._held:
                return False
            try:
                fcntl.lockf(self._claims, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
            except (BlockingIOError, PermissionError):  # the system may say either
                return False
            self._held.add(byte)
            return True

    def _release(self, byte: int) -> None:
        with self._books:
            fcntl.lockf(self._claims, fcntl.LOCK_UN, 1, byte)
            self._held.discard(byte)


_stores: dict[Path, Store] = {}
_opening = threading.Lock()


def open_store(folder: CacheFolder, about: About) -> Store:
    """Return this process's store of a dataset."""
    path = folder.path_of(about)
    store = _stores.get(path)
    if store is None:
        with _opening:
            store = _stores.get(path)
            if store is None:
                store = _stores[path] = _make(folder, about)
    return store


def close_store(folder: CacheFolder, about: About) -> None:
    """Close this process's store of a dataset, if it is open."""
    with _opening:
        store = _stores.pop(folder.path_of(about), None)
        if store is not None:
            store.close()


def count_samples(folder: CacheFolder, about: About) -> int:
    """How many samples a dataset has stored, without being one that uses it."""
    import lmdb

    path = folder.path_of(about)
    with _opening:
        if path in _stores:
            return _stores[path].count()
        try:
            with lmdb.open(str(path), readonly=True, lock=False, create=False) as environment:
                return int(environment.stat()["entries"])
        except lmdb.Error:  # dropped meanwhile
            return 0


def _make(folder: CacheFolder, about: About) -> Store:
    try:
        import lmdb
    except ImportError:
        raise UsageError(
            "the cache needs LMDB, which is not installed", hint="`pip install 'shoestring[fleet]'`"
        ) from None
    try:
        return Store(folder, about)
    except (OSError, lmdb.Error) as error:
        raise FleetError(
            f"the cache in `{folder.path}` cannot be opened: {error}",
            hint=f"make room there, or set {VARIABLE} to another folder",
        ) from None


def _key(index: int) -> bytes:
    return index.to_bytes(8, "big")


def _before_fork() -> None:
    _opening.acquire()
    for store in _stores.values():
        store.pause()


def _after_fork_in_parent() -> None:
    for store in _stores.values():
        store.go_on()
    _opening.release()


def _after_fork_in_child() -> None:
    global _opening
    _opening = threading.Lock()
    for store in _stores.values():
        store.forget_threads()


os.register_at_fork(
    before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child
)
