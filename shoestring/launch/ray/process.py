"""One process of a run on a Ray node: what an actor holds.

An actor starts a shard or a worker as a process of its own, the same command that the local
launcher starts, and passes on what it prints and reports. When the actor ends, however it
ends, its process does. Keys come with the order and are written into a folder that only
this user can enter; nothing here prints them. What an actor that was killed left of its folder,
the next one on the machine removes.

A `Seat` works in any process; only `RaySeat` needs Ray.
"""

import fcntl
import importlib
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from shoestring.checkpoint.resume import AUTO, choose
from shoestring.config import Run
from shoestring.errors import ShoestringError
from shoestring.launch import lifeline
from shoestring.launch.child import Child
from shoestring.launch.lifeline import Lifeline
from shoestring.launch.shard import ShardOrder, ShardProcess, local_address
from shoestring.launch.stream import Stream
from shoestring.observe.events import Tail

_QUEUED_LINES = 10_000  # when the driver takes no more, the process waits with its next line
_TAKEN_LINES = 1_000
_DRAIN_S = 2.0
_FOLDERS = "shoestring-seat-"
_LOCK = "lock"  # held while the folder's seat is alive, whichever container it is in
_FRESH_S = 60.0  # a younger folder may not be locked yet


@dataclass(frozen=True)
class Order:
    """What a seat is to start. A shard where `shard` is given, else the worker `run.worker`.

    A shard whose order has no address listens where only this user's processes of its own
    machine reach it.
    """

    run: Run
    command: tuple[str, ...] = ()
    shard: ShardOrder | None = None
    keys: Mapping[str, bytes] = field(default_factory=dict, repr=False)  # files by name
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    threads: int = 1
    folder: str = ""  # to start in; where it does not exist, the actor's own


@dataclass(frozen=True)
class Report:
    """What came of a process since the last report."""

    lines: tuple[tuple[str, bool], ...]  # and whether on stderr
    events: tuple[dict[str, Any], ...]
    code: int | None  # once it has ended and all it printed was reported
    last_lines: tuple[str, ...] = ()  # of stderr, with the code


class Seat:
    """Starts one process and follows it. Several threads may call it."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._lines: queue.Queue[tuple[str, bool] | None] = queue.Queue(_QUEUED_LINES)
        self._lifeline = Lifeline()
        _sweep(Path(tempfile.gettempdir()))
        self._folder = Path(tempfile.mkdtemp(prefix=_FOLDERS))  # of this user alone
        self._lock = (self._folder / _LOCK).open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._tail = Tail(self._folder / "events")
        self._shard: ShardProcess | None = None
        keys = write_keys(order.keys, self._folder / "keys") if order.keys else None
        self._child = self._start_worker(keys) if order.shard is None else self._start_shard(keys)

    def where(self) -> tuple[str, int, int]:
        """The folder it works in, its process and that of its child."""
        return str(self._folder), os.getpid(), self._child.process.pid

    def address(self) -> tuple[str, str, str]:
        """Where the shard listens, once it does; or an error's message and hint."""
        if self._shard is None:
            return "", "this seat holds no shard", "this is a fault of ours: please report it"
        try:
            return self._shard.wait_ready(), "", ""
        except ShoestringError as error:
            return "", error.message, error.hint

    def poll(self, wait_s: float) -> Report:
        """Report what is new; wait up to `wait_s` for a line or the end."""
        lines: list[tuple[str, bool]] = []
        with suppress(queue.Empty):
            while len(lines) < _TAKEN_LINES:
                line = self._lines.get(timeout=wait_s) if not lines else self._lines.get_nowait()
                if line is None:  # the process has ended
                    break
                lines.append(line)
        code = None
        if self._child.ended.is_set() and self._lines.empty():
            for stream in self._child.streams:
                stream.join(_DRAIN_S)
            if self._lines.empty():
                code = self._child.code
        last = tuple(self._child.streams[0].last) if code is not None else ()
        return Report(tuple(lines), tuple(self._tail.poll()), code, last)

    def stop(self, grace_s: float) -> None:
        """End the process and its children; returns when they are gone."""
        self._child.end(grace_s)
        self._lifeline.close()

    def close(self) -> None:
        """Remove the folder, keys and all. After `stop`, when nothing is left to report."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._lock.close()

    def _start_shard(self, keys: Path | None) -> Child:
        order = self._order.shard
        assert order is not None  # else a worker is started
        address = order.address or local_address(self._folder, order.index)
        order = replace(order, address=address, keys=keys, folder=self._folder / "events")
        self._shard = ShardProcess(order, self._lifeline, stderr=subprocess.PIPE)
        child = Child(f"shard {order.index}", self._shard.process, self._note_end)
        self._pass_on(child, self._shard.process.stderr, to_stderr=True)
        return child

    def _start_worker(self, keys: Path | None) -> Child:
        order = self._order
        run = replace(order.run, keys=keys, folder=self._folder / "events")
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("SHOESTRING_")},
            **order.environment,
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": str(order.threads),
            **run.to_environment(),
            lifeline.VARIABLE: str(self._lifeline.reader),
        }
        process = subprocess.Popen(
            [sys.executable, *order.command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            cwd=order.folder if os.path.isdir(order.folder) else None,
            pass_fds=[self._lifeline.reader],
            process_group=0,
        )
        child = Child(f"worker {run.worker}", process, self._note_end)
        self._pass_on(child, process.stderr, to_stderr=True)
        self._pass_on(child, process.stdout, to_stderr=False)
        return child

    def _pass_on(self, child: Child, pipe: IO[bytes] | None, *, to_stderr: bool) -> None:
        if pipe is not None:
            child.streams.append(Stream(pipe, lambda line: self._lines.put((line, to_stderr))))

    def _note_end(self, child: Child) -> None:
        # A waiting `poll` is to return at once. Not in this thread: the queue may be full.
        threading.Thread(target=self._lines.put, args=(None,), daemon=True).start()


class RaySeat(Seat):
    """A seat inside an actor. A worker that Ray starts again goes on from the newest checkpoint."""

    def __init__(self, order: Order) -> None:
        ray: Any = importlib.import_module("ray")
        said: list[str] = []
        if order.shard is None and ray.get_runtime_context().was_current_actor_reconstructed:
            run = order.run
            order = replace(
                order, run=replace(run, resume=newest_or(run.checkpoint, run.resume, said.append))
            )
        super().__init__(order)
        for text in said:
            self._lines.put((f"shoestring: {text}", True))


def newest_or(checkpoint: Path | None, otherwise: Path | None, say: Callable[[str], None]) -> Path | None:
    """The newest undamaged checkpoint of a run, to go on from; without one, what it began with."""
    return choose(AUTO, checkpoint, say) or otherwise


def write_keys(files: Mapping[str, bytes], folder: Path) -> Path:
    """Write key files, given by name, into a new folder that only this user can enter."""
    folder.mkdir(mode=0o700)
    for name, content in files.items():
        descriptor = os.open(folder / Path(name).name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
    return folder


def tcp_address(host: str) -> str:
    """Where a shard listens on a host, at a port that is free."""
    return f"tcp://[{host}]:0" if ":" in host else f"tcp://{host}:0"


def _sweep(parent: Path) -> None:
    """Remove the folders of seats that were killed."""
    for folder in parent.glob(f"{_FOLDERS}*"):
        # Another user's cannot be opened; one that is locked is in use.
        with suppress(OSError):
            if time.time() - folder.stat().st_mtime < _FRESH_S:
                continue
            with (folder / _LOCK).open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
