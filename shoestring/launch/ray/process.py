"""One process of a run on a Ray node: what an actor holds.

An actor starts a shard or a worker as a process of its own, the same command that the local
launcher starts, and passes on what it prints and reports. When the actor ends, however it
ends, its process does. Keys come with what it is told and are written into a folder that only
this user can enter; nothing here prints them. What an actor that was killed left of its folder,
the next one on the machine removes.

A `NodeProcess` works in any process; only `ProcessActor` needs Ray.
"""

import fcntl
import importlib
import os
import queue
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from shoestring.checkpoint.resume import AUTO, choose
from shoestring.config import Run
from shoestring.errors import ShoestringError
from shoestring.launch.group import without_torchruns
from shoestring.launch.shard import ShardArguments, local_address
from shoestring.launch.supervisor import Child, ShardChild, Supervisor
from shoestring.observe.events import Tail

_QUEUED_LINES = 10_000  # when the driver takes no more, the process waits with its next line
_TAKEN_LINES = 1_000
_FOLDERS = "shoestring-process-"
_LOCK = "lock"  # held while the folder's actor is alive, whichever container it is in
_FRESH_S = 60.0  # a younger folder may not be locked yet


@dataclass(frozen=True)
class ProcessSpec:
    """The process that an actor starts: a shard where `shard` is given, else the worker `run.worker`.

    A shard without an address listens where only this user's processes of its own machine
    reach it.
    """

    run: Run
    command: tuple[str, ...] = ()
    shard: ShardArguments | None = None
    keys: Mapping[str, bytes] = field(default_factory=dict, repr=False)  # files by name
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    threads: int = 1
    folder: str = ""  # to start in; where it does not exist, the actor's own


@dataclass(frozen=True)
class Report:
    """Lines and events of a process since the last report, and its end."""

    lines: tuple[tuple[str, bool], ...]  # and whether on stderr
    events: tuple[dict[str, Any], ...]
    code: int | None  # once it has ended and all it printed was reported
    last_lines: tuple[str, ...] = ()  # of stderr, with the code


class NodeProcess:
    """Starts one process and follows it. Several threads may call it."""

    def __init__(self, spec: ProcessSpec) -> None:
        self._spec = spec
        self._lines: queue.Queue[tuple[str, bool] | None] = queue.Queue(_QUEUED_LINES)
        _sweep(Path(tempfile.gettempdir()))
        self._folder = Path(tempfile.mkdtemp(prefix=_FOLDERS))  # of this user alone
        self._lock = (self._folder / _LOCK).open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._tail = Tail(self._folder / "events")
        self._supervisor = Supervisor(self._queue_line, self._note_end)
        keys = write_keys(spec.keys, self._folder / "keys") if spec.keys else None
        run = replace(spec.run, keys=keys, folder=self._folder / "events")
        self._shard: ShardChild | None = None
        if spec.shard is not None:
            address = spec.shard.address or local_address(self._folder, spec.shard.index)
            self._shard = self._supervisor.start_shard(replace(spec.shard, address=address, run=run))
        self._child = self._shard or self._start_worker(run)

    def where(self) -> tuple[str, int, int]:
        """The folder it works in, its process and that of its child."""
        return str(self._folder), os.getpid(), self._child.process.pid

    def address(self) -> tuple[str, str, str]:
        """Where the shard listens, once it does; or an error's message and hint."""
        if self._shard is None:
            return "", "this process is no shard", "this is a fault of ours: please report it"
        try:
            return self._shard.wait_ready(self._spec.run.ready_timeout_s), "", ""
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
            self._child.drain()
            if self._lines.empty():
                code = self._child.code
        last = self._child.last_lines if code is not None else ()
        return Report(tuple(lines), tuple(self._tail.poll()), code, last)

    def stop(self, grace_s: float) -> None:
        """End the process and its children; returns when they are gone."""
        self._supervisor.stop(grace_s)

    def close(self) -> None:
        """Remove the folder, keys and all. After `stop`, when nothing is left to report."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._lock.close()

    def _start_worker(self, run: Run) -> Child:
        spec = self._spec
        environment = {
            **{
                name: value
                for name, value in without_torchruns(os.environ).items()
                if not name.startswith("SHOESTRING_")
            },
            **spec.environment,
            "OMP_NUM_THREADS": str(spec.threads),
        }
        folder = spec.folder if os.path.isdir(spec.folder) else None
        return self._supervisor.start_worker(spec.command, run, environment, folder)

    def _queue_line(self, _child: Child, line: str, is_err: bool) -> None:
        self._lines.put((line, is_err))

    def _note_end(self, _child: Child) -> None:
        # A waiting `poll` is to return at once. Not in this thread: the queue may be full.
        threading.Thread(target=self._lines.put, args=(None,), daemon=True).start()


class ProcessActor(NodeProcess):
    """A `NodeProcess` inside an actor. A worker that Ray starts again goes on from the newest checkpoint."""

    def __init__(self, spec: ProcessSpec) -> None:
        said: list[str] = []
        starts = _starts() if spec.shard is None else 1
        if starts > 1:
            run = spec.run
            resume = newest_or(run.checkpoint, run.resume, said.append)
            spec = replace(spec, run=replace(run, resume=resume, incarnation=starts))
        super().__init__(spec)
        for text in said:
            self._lines.put((f"shoestring: {text}", True))


def _starts() -> int:
    """How often Ray has started this actor, counted by its control service."""
    ray: Any = importlib.import_module("ray")
    state: Any = importlib.import_module("ray._private.state")
    facts = state.actors(ray.get_runtime_context().get_actor_id())
    return 1 + int(facts["NumRestarts"])


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
    """Remove the folders of actors that were killed."""
    for folder in parent.glob(f"{_FOLDERS}*"):
        # Another user's cannot be opened; one that is locked is in use.
        with suppress(OSError):
            if time.time() - folder.stat().st_mtime < _FRESH_S:
                continue
            with (folder / _LOCK).open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
