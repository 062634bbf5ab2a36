"""Compiled kernels on disk: a file for each kernel and the types it was compiled for.

A file is named after the kernel and the digest of its key (`key.py`), the types and the processor.
So a file never becomes stale: changed code has another name. Files of code that is no longer used
stay until somebody removes the folder `~/.cache/shoestring/kernels`, which costs one compilation.
Numba's own cache would compile anew after any edit of a kernel's file, and would not notice one in
another file that the kernel calls into.

To compile everything takes the better part of a minute. Processes that start together on a machine
where nothing is compiled yet do it one after the other (`compiled_once`): the first compiles, the
others load what it wrote. Where the folder cannot be written, each process compiles for itself.

All methods of a `StoredKernel` are called under Numba's lock, which one thread at a time holds.
"""

import contextlib
import fcntl
import hashlib
import os
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from numba.core import config
from numba.core.compiler import CompileResult
from numba.core.serialize import dumps, loads

from shoestring.compiled.key import key_of

_PATIENCE_S, _LOOK_S = 300.0, 0.2  # for another process that compiles


def _find_folder() -> Path:
    config_: Any = config
    root = config_.CACHE_DIR or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "shoestring" / "kernels"


_folder = _find_folder()


class StoredKernel:
    """Takes the place of Numba's own cache (`numba.core.caching.FunctionCache`) of one kernel."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    @property
    def cache_path(self) -> str:
        return str(_folder)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return the code for these types, or None; then this process has the right to compile it."""
        target_context.refresh()
        path = self._path(sig, target_context.codegen())
        found = _read(path)
        if found is None and _turn.take():
            found = _read(path)
            if found is not None:
                _turn.give_back()  # the others need not wait while this one loads
        if found is None:
            return None
        try:
            return CompileResult._rebuild(target_context, *loads(found))
        except Exception:  # a file that was cut off can raise anything; the kernel is compiled anew
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Write compiled code, where that can be done."""
        if data.library.has_dynamic_globals:  # addresses of this process
            return
        # Numba now and then has no object code at hand when several threads compile (RuntimeError).
        # This process can run the kernel all the same; another one compiles it.
        with contextlib.suppress(OSError, RuntimeError):
            path = self._path(sig, data.codegen)
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_suffix(f".{uuid.uuid4().hex}")
            try:
                part.write_bytes(dumps(data._reduce()))
                part.replace(path)
            finally:
                part.unlink(missing_ok=True)

    def _path(self, sig: Any, codegen: Any) -> Path:
        function = self._kernel.py_func
        whole = repr((key_of(self._kernel), str(sig), codegen.magic_tuple()))
        digest = hashlib.sha256(whole.encode()).hexdigest()[:32]
        return _folder / f"{function.__module__}.{function.__qualname__}-{digest}.kernel"


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None


class _Turn:
    """This process's turn to compile, among processes: a lock on a file, from the first kernel that is
    not on disk until the last `compiled_once` of this process ends."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._contexts = 0
        self._file: IO[bytes] | None = None

    def enter(self) -> None:
        with self._lock:
            self._contexts += 1

    def leave(self) -> None:
        with self._lock:
            self._contexts -= 1
            if self._contexts == 0:
                self._close()

    def take(self) -> bool:
        """Wait for the turn, within `compiled_once`; return whether it was taken just now."""
        if self._contexts == 0 or self._file is not None:
            return False
        try:
            _folder.mkdir(parents=True, exist_ok=True)
            file = (_folder / "compiling.lock").open("ab")
        except OSError:
            return False
        _wait_for(file)
        with self._lock:
            self._file = file
            if self._contexts == 0:  # the contexts were another thread's, and have ended
                self._close()
        return True

    def give_back(self) -> None:
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


_turn = _Turn()


def _wait_for(file: IO[bytes]) -> None:
    """Lock a file; go on without the lock after a while."""
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until it is closed, or this process ends
            return
        except BlockingIOError:
            time.sleep(_LOOK_S)  # there is no waiting for a lock with a limit
        except OSError:  # a file system without locks
            return


@contextlib.contextmanager
def compiled_once() -> Iterator[None]:
    """Run kernels inside: what is not on disk yet is compiled by one process at a time."""
    _turn.enter()
    try:
        yield
    finally:
        _turn.leave()
