"""Compiled kernels on disk: a file for each kernel and the types it was compiled for.

A file is named after the kernel and the digest of its key (`key.py`), the types and the processor.
So a file never becomes stale: changed code has another name. Files of code that is no longer used
stay until somebody removes the folder `~/.cache/shoestring/kernels`, which costs one compilation.
Numba's own cache would compile anew after any edit of a kernel's file, and would not notice one in
another file that the kernel calls into.

Each kernel is compiled by one process at a time: others that need it wait, and load what it wrote.
Processes that compile different kernels do so at the same time (`ahead.py`). Where the folder cannot be
written, each process compiles for itself.

All methods of a `StoredKernel` are called under Numba's lock, which one thread at a time holds. A kernel
is locked while kernels that it calls are; as calls go down only, processes never wait in a circle.
"""

import contextlib
import fcntl
import hashlib
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from numba.core import config
from numba.core.compiler import CompileResult
from numba.core.serialize import dumps, loads

from shoestring.compiled.key import key_of

_PATIENCE_S, _LOOK_S = 300.0, 0.05  # for another process that compiles


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
        if found is None:
            if getattr(_here, "loads_only", False):
                raise NotStoredError(path.name)
            if _take(path):
                found = _read(path)
                if found is not None:
                    _give_back(path)
        if found is None:
            return None
        try:
            return CompileResult._rebuild(target_context, *loads(found))
        except Exception:  # a file that was cut off can raise anything; the kernel is compiled anew
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Write compiled code, where that can be done."""
        path = self._path(sig, data.codegen)
        # Numba now and then has no object code at hand when several threads compile (RuntimeError).
        # This process can run the kernel all the same; another one compiles it.
        with contextlib.suppress(OSError, RuntimeError):
            if not data.library.has_dynamic_globals:  # addresses of this process
                write(path, lambda: dumps(data._reduce()))
        _give_back(path)

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


def write(path: Path, make: Callable[[], bytes]) -> None:
    """Give a file its name once it is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{uuid.uuid4().hex}")
    try:
        part.write_bytes(make())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


# Locked by this process: kernels that it compiles. One whose compilation failed stays so.
_locked: dict[Path, IO[bytes]] = {}


def _take(path: Path) -> bool:
    """Wait until no other process compiles a kernel; return whether this one did not hold it before."""
    if path in _locked:
        return False
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        _locked[path] = file = path.with_suffix(".lock").open("ab")
        _wait_for(file)
    return path in _locked


def _give_back(path: Path) -> None:
    """Let others have a kernel that is on disk now. Who waits has the file open that loses its name."""
    file = _locked.pop(path, None)
    if file is not None:
        with contextlib.suppress(OSError):
            path.with_suffix(".lock").unlink(missing_ok=True)
        file.close()


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
def alone(name: str) -> Iterator[bool]:
    """Hold a lock of this name among processes; False where the folder cannot be written."""
    with contextlib.ExitStack() as stack:
        is_written = False
        with contextlib.suppress(OSError):
            _folder.mkdir(parents=True, exist_ok=True)
            _wait_for(stack.enter_context((_folder / f"{name}.lock").open("ab")))
            is_written = True
        yield is_written


class NotStoredError(Exception):
    """A kernel is not on disk, and was not to be compiled here."""


_here = threading.local()


@contextlib.contextmanager
def loading_only() -> Iterator[None]:
    """Run kernels inside on this thread: what is not on disk raises `NotStoredError`."""
    _here.loads_only = True
    try:
        yield
    finally:
        _here.loads_only = False
