"""How kernels are compiled: without the GIL, and kept on disk under the digest of their source.

Numba notices a change in the file of a kernel, but not in a file that the kernel calls
into, and a stale kernel would decode other bits. So compiled code is kept in a folder
named after all of this package's sources and where they lie.

Compiling takes the better part of a minute. Processes that start together on a machine that has
nothing compiled yet do it one after the other (`compiled_once`): the first compiles, the others
load what it wrote.

`encode_jit` may fuse multiply and add, as encoders are free to round. `decode_jit` may
not: what a decoder computes is defined to the bit. `sum_jit` may reorder sums too.

Kernels do not count references to arrays. Numba's counters lie wherever there was room, those of
two threads often in one cache line, and two threads that count slow each other down to the
speed of one. So kernels that several threads run make no arrays; those that do are under
`making_jit` and `making_sum_jit`.
"""

import contextlib
import fcntl
import hashlib
import os
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import llvmlite.binding as llvm
import numba
from numba.core import config

Kernel = Callable[..., Any]

_config: Any = config

_PATIENCE_S, _LOOK_S = 300.0, 0.2  # for another process that compiles

_lock = threading.Lock()


def _find_folder() -> str:
    own = Path(__file__).parents[1]
    digest = hashlib.sha256(str(own).encode())
    for source in sorted([*own.glob("compiled/*.py"), *own.glob("codec/dct/**/*.py")]):
        digest.update(source.read_bytes())
    root = _config.CACHE_DIR or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return str(Path(root) / "shoestring" / "kernels" / digest.hexdigest()[:16])


_FOLDER = _find_folder()


def _compile(function: Kernel, fastmath: set[str] | bool, makes_arrays: bool = False) -> Kernel:
    options: dict[str, Any] = {"_nrt": makes_arrays}
    decorate = numba.njit(nogil=True, cache=True, error_model="numpy", fastmath=fastmath, **options)
    with _lock:  # Numba reads the folder from its configuration while it decorates
        before, _config.CACHE_DIR = _config.CACHE_DIR, _FOLDER
        try:
            kernel: Kernel = decorate(function)
        finally:
            _config.CACHE_DIR = before
    return kernel


@contextlib.contextmanager
def compiled_once(what: str) -> Iterator[None]:
    """Run the kernels of `what` inside: alone among processes, until they have been compiled once.

    Where the folder cannot be written, or the first takes too long, each process compiles for itself.
    """
    machine = f"{llvm.get_host_cpu_name()}-{numba.__version__}"
    done = Path(_FOLDER) / f"{what}-{machine}.compiled"
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):
            if not done.exists():
                done.parent.mkdir(parents=True, exist_ok=True)
                lock = held.enter_context(done.with_suffix(".lock").open("w"))
                _wait_for(lock, done)
                if done.exists():
                    lock.close()  # the others need not wait while this one loads
        yield
        with contextlib.suppress(OSError):
            done.touch()


def _wait_for(lock: IO[str], done: Path) -> None:
    """Take the lock; do without if what it guards is done, or after a while."""
    deadline = time.monotonic() + _PATIENCE_S
    while not done.exists() and time.monotonic() < deadline:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until it is closed, or this process ends
            return
        except BlockingIOError:
            time.sleep(_LOOK_S)  # there is no waiting for a lock with a limit


def specialise(
    compiler: Callable[[Kernel], Kernel], template: Any, suffix: object, **constants: Any
) -> Kernel:
    """Compile a copy of `template` in which some of its module's names are constants.

    A closure would do as well, but Numba finds compiled closures on disk in no later process.
    """
    name = f"{template.__name__}_{suffix}"
    function = types.FunctionType(template.__code__, {**template.__globals__, **constants}, name)
    function.__qualname__ = name
    function.__module__ = template.__module__
    return compiler(function)


def encode_jit(function: Kernel) -> Kernel:
    return _compile(function, {"contract"})


def decode_jit(function: Kernel) -> Kernel:
    return _compile(function, False)


def sum_jit(function: Kernel) -> Kernel:
    return _compile(function, {"contract", "reassoc"})


def making_jit(function: Kernel) -> Kernel:
    return _compile(function, False, makes_arrays=True)


def making_sum_jit(function: Kernel) -> Kernel:
    return _compile(function, {"contract", "reassoc"}, makes_arrays=True)


@decode_jit
def copy(source, first, target, start, count):
    """Copy a run of values: to assign a slice would need memory in between."""
    own, there = source[first : first + count], target[start : start + count]
    for i in range(count):
        there[i] = own[i]
