"""Start, watch and end processes of a run on this machine; every launcher does it with this.

The local launcher supervises all workers and shards of a run, an actor on a Ray node one of them,
and under torchrun and Slurm the first worker of a host its shard.

Promises: after `stop` no process that was started is left, nor its children. When the supervising
process is gone, killed too, workers and shards notice it by the lifeline and end by themselves.
Signals of the terminal reach the launcher alone, which tells the processes: each leads a group.
"""

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import IO

from shoestring.config import Run
from shoestring.launch import lifeline
from shoestring.launch.lifeline import Lifeline
from shoestring.launch.shard import ShardArguments, read_address
from shoestring.launch.stream import Stream

DRAIN_S = 2.0  # a grandchild may keep a pipe open; what ended processes printed is read by then

ShowLine = Callable[["Child", str, bool], None]  # a line without its end, and whether it was on stderr


class Child:
    """A process that leads its own group. When it has ended, its children are killed too.

    Without `show`, it prints where this process does.
    """

    def __init__(
        self,
        who: str,
        process: "subprocess.Popen[bytes]",
        show: ShowLine | None = None,
        on_end: Callable[["Child"], None] = lambda child: None,
    ) -> None:
        self.who = who
        self.process = process
        self.ended = threading.Event()
        self._on_end = on_end
        pipes = [(process.stderr, True), (process.stdout, False)]
        self.streams = [self._stream(pipe, is_err, show) for pipe, is_err in pipes if pipe and show]
        threading.Thread(target=self._wait, daemon=True).start()

    @property
    def code(self) -> int:
        """The exit code as a shell counts it: 128 and the signal for one that was killed."""
        code = self.process.returncode
        return code if code >= 0 else 128 - code

    @property
    def last_lines(self) -> tuple[str, ...]:
        """What it printed last on stderr."""
        return tuple(self.streams[0].last) if self.streams else ()

    def signal(self, number: signal.Signals) -> None:
        """Signal the process and its children, such as data loaders, if it has not ended."""
        with suppress(ProcessLookupError, PermissionError):
            if not self.ended.is_set():
                os.killpg(self.process.pid, number)

    def drain(self, timeout_s: float = DRAIN_S) -> None:
        """Wait until all that it printed was passed on."""
        deadline = time.monotonic() + timeout_s
        for stream in self.streams:
            stream.join(max(0.0, deadline - time.monotonic()))

    def _stream(self, pipe: IO[bytes], is_err: bool, show: ShowLine) -> Stream:
        return Stream(pipe, lambda line: show(self, line, is_err))

    def _wait(self) -> None:
        # Before its number may be used again: children it has left behind are of no use to anyone.
        with suppress(ChildProcessError):
            os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
        self.signal(signal.SIGKILL)
        self.process.wait()
        self.ended.set()
        self._on_end(self)


class ShardChild(Child):
    """A shard that was started and may not listen yet."""

    def __init__(
        self,
        index: int,
        process: "subprocess.Popen[bytes]",
        show: ShowLine | None,
        on_end: Callable[[Child], None],
    ) -> None:
        self.index = index
        self._answer, process.stdout = process.stdout, None  # the address, not to be passed on
        super().__init__(f"shard {index}", process, show, on_end)

    def wait_ready(self, timeout_s: float) -> str:
        """Return the address it listens on."""
        return read_address(self.index, self.process, self._answer, timeout_s)


class Supervisor:
    """The processes that one launcher has started on this machine.

    Lines that they print go to `show`, from threads of their own; without it they print where
    this process does. `on_end` is called in a thread, too.
    """

    def __init__(
        self, show: ShowLine | None = None, on_end: Callable[[Child], None] = lambda child: None
    ) -> None:
        self.children: list[Child] = []
        self._show = show
        self._on_end = on_end
        self._lifeline = Lifeline()
        self._ended: queue.SimpleQueue[Child] = queue.SimpleQueue()

    def start_worker(
        self, command: Sequence[str], run: Run, environment: Mapping[str, str], folder: str | None = None
    ) -> Child:
        """Start a worker of a run: a Python script or module with its arguments."""
        told = {
            **environment,
            "PYTHONUNBUFFERED": "1",  # a line is passed on when it is printed
            **run.to_environment(),
            lifeline.VARIABLE: str(self._lifeline.reader),
        }
        process = self._open([sys.executable, *command], told, folder, is_stdout_read=self._show is not None)
        return self._add(Child(f"worker {run.worker}", process, self._show, self._note_end))

    def start_shard(self, arguments: ShardArguments) -> ShardChild:
        """Start a shard; `wait_ready` says where it listens."""
        # What is set for workers, such as their lifeline, is not for a shard.
        own = {name: value for name, value in os.environ.items() if not name.startswith("SHOESTRING_")}
        process = self._open(arguments.command(self._lifeline.reader), own, None, is_stdout_read=True)
        child = ShardChild(arguments.index, process, self._show, self._note_end)
        self._add(child)
        return child

    def next_ended(self, timeout_s: float) -> Child | None:
        """A process that has ended since; each is returned once. `None` after the time-out."""
        with suppress(queue.Empty):
            return self._ended.get(timeout=timeout_s)
        return None

    def stop(self, grace_s: float) -> None:
        """Ask all to end, kill those that have not within `grace_s`; returns when all are gone."""
        for child in self.children:
            child.signal(signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        for child in self.children:
            child.ended.wait(max(0.0, deadline - time.monotonic()))
        for child in self.children:
            child.signal(signal.SIGKILL)
            child.ended.wait()
        deadline = time.monotonic() + DRAIN_S
        for child in self.children:
            child.drain(max(0.0, deadline - time.monotonic()))
        self.let_go()

    def let_go(self) -> None:
        """Close the lifeline: processes that are left end by themselves. May be called again."""
        self._lifeline.close()

    def _open(
        self, command: list[str], environment: Mapping[str, str], folder: str | None, *, is_stdout_read: bool
    ) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if is_stdout_read else None,
            stderr=subprocess.PIPE if self._show is not None else None,
            env=environment,
            cwd=folder,
            pass_fds=[self._lifeline.reader],
            process_group=0,  # Ctrl-C is for the launcher, which tells its processes
        )

    def _add(self, child: Child) -> Child:
        self.children.append(child)
        return child

    def _note_end(self, child: Child) -> None:
        self._ended.put(child)
        self._on_end(child)
