"""Run a script as several workers on this machine, with shards beside them.

Promises: when `run_local` returns or raises, none of the processes it started is left, nor
their children; when the launcher itself is killed they end by themselves. The first worker
that fails ends the run, and its exit code is the run's.
"""

import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

from shoestring.config import Run
from shoestring.launch import lifeline
from shoestring.launch.child import Child
from shoestring.launch.lifeline import Lifeline
from shoestring.launch.shard import ShardOrder, ShardProcess, local_address
from shoestring.launch.signals import signals_as_exceptions, signals_ignored
from shoestring.launch.stream import Stream
from shoestring.observe.events import Tail
from shoestring.observe.progress import Board, Display

_GRACE_S = 5.0  # between SIGTERM and SIGKILL
_SAVING_S = 60.0  # for shards to end after a run that went well: a checkpoint may be half written
_LOOK_S = 0.25
_DRAIN_S = 2.0


@dataclass(frozen=True)
class Failure:
    """The process that ended a run, and what it said last."""

    who: str
    code: int  # as a shell counts it: 128 and the signal for one that was killed
    last_lines: tuple[str, ...]


@dataclass
class Outcome:
    """How a run went. An exit code is `None` for a worker that was never started."""

    seconds: float = 0.0
    exit_codes: list[int | None] = field(default_factory=list)
    failure: Failure | None = None


Reach = Callable[[int, Sequence[str]], tuple[str, ...]]


def run_local(
    command: list[str], run: Run, *, shards: int, threads: int | None = None, reach: Reach | None = None
) -> Outcome:
    """Run `command` once for each of the run's workers, and wait for all of them.

    `run.folder` must be given; `run.shards` and `run.worker` are filled in. `threads` is
    what each worker may compute with; by default they share the cores. `reach` may put
    something between: it gets a worker and the shards' TCP addresses, and returns those
    that the worker is to use.
    """
    crew = _Crew(command, run, shards, threads, reach)
    began = time.monotonic()
    with signals_as_exceptions():
        try:
            crew.start()
            crew.wait()
        finally:
            crew.stop()
    crew.outcome.seconds = time.monotonic() - began
    return crew.outcome


class _Crew:
    """All processes of a run on this machine."""

    def __init__(
        self, command: list[str], run: Run, shards: int, threads: int | None, reach: Reach | None
    ) -> None:
        self.outcome = Outcome(exit_codes=[None] * run.workers)
        self._command = command
        self._run = run
        self._count = shards
        self._threads = threads
        self._reach = reach
        self._lifeline = Lifeline()
        self._folder = Path(tempfile.mkdtemp(prefix="shoestring-"))
        self._shards: list[Child] = []
        self._workers: list[Child] = []
        self._ended: queue.SimpleQueue[Child] = queue.SimpleQueue()
        self._board = Board()
        self._display = Display(self._board)
        self._tail = Tail(run.folder) if run.folder is not None else None

    def start(self) -> None:
        """Start the shards, and when they listen the workers."""
        run, cores = self._run, len(os.sched_getaffinity(0))
        if self._tail is not None:
            self._tail.poll()  # what an earlier run in the same folder did
        starting = []
        for index in range(self._count):
            order = ShardOrder(
                index,
                self._count,
                run.name,
                local_address(self._folder, index) if self._reach is None else "tcp://127.0.0.1:0",
                threads=max(1, cores // (run.workers + self._count)),
                checkpoint=run.checkpoint,
                resume=run.resume,
                folder=run.folder,
            )
            shard = ShardProcess(order, self._lifeline, stderr=subprocess.PIPE)
            child = Child(f"shard {index}", shard.process, self._ended.put)
            self._shards.append(child)
            self._pass_on(child, shard.process.stderr, f"[shard {index}] ", to_stderr=True)
            starting.append(shard)
        run = replace(run, shards=tuple(shard.wait_ready() for shard in starting))
        threads = self._threads or max(1, cores // run.workers)
        for worker in range(run.workers):
            shards = run.shards if self._reach is None else self._reach(worker, run.shards)
            self._start_worker(replace(run, worker=worker, local=worker, shards=shards), threads)

    def _start_worker(self, run: Run, threads: int) -> None:
        environment = {
            **os.environ,
            "PYTHONUNBUFFERED": "1",  # a line is passed on when it is printed
            **run.to_environment(),
            lifeline.VARIABLE: str(self._lifeline.reader),
        }
        if self._threads is not None or "OMP_NUM_THREADS" not in environment:
            environment["OMP_NUM_THREADS"] = str(threads)
        process = subprocess.Popen(
            [sys.executable, *self._command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            pass_fds=[self._lifeline.reader],
            process_group=0,  # Ctrl-C is for the launcher, which tells the workers
        )
        child = Child(f"worker {run.worker}", process, self._ended.put)
        self._workers.append(child)
        prefix = f"[worker {run.worker}] " if run.worker else ""
        self._pass_on(child, process.stderr, prefix, to_stderr=True)
        self._pass_on(child, process.stdout, prefix, to_stderr=False)

    def wait(self) -> None:
        """Return when all workers have ended, or one process has failed."""
        left = len(self._workers)
        while left:
            with suppress(queue.Empty):
                child = self._ended.get(timeout=_LOOK_S)
                left -= child in self._workers
                if child.code != 0:
                    self._drain([child])
                    self.outcome.failure = Failure(child.who, child.code, tuple(child.streams[0].last))
                    return
            self._look()

    def stop(self) -> None:
        """End what is left, wait for it, and clean up. Signals are ignored meanwhile."""
        with signals_ignored():
            self._stop()

    def _stop(self) -> None:
        children = [*self._workers, *self._shards]
        is_well = bool(self._workers) and all(
            child.ended.is_set() and child.code == 0 for child in self._workers
        )
        for child in children:
            child.signal(signal.SIGTERM)
        deadline = time.monotonic() + (_SAVING_S if is_well else _GRACE_S)
        for child in children:
            child.ended.wait(max(0.0, deadline - time.monotonic()))
        for child in children:
            child.signal(signal.SIGKILL)
            child.ended.wait()
        self._drain(children)
        self._look()
        self._display.close()
        self._lifeline.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        for worker, child in enumerate(self._workers):
            self.outcome.exit_codes[worker] = child.code

    def _look(self) -> None:
        if self._tail is not None:
            for event in self._tail.poll():
                self._board.add(event)
        self._display.refresh()

    def _pass_on(self, child: Child, pipe: IO[bytes] | None, prefix: str, *, to_stderr: bool) -> None:
        def show(line: str) -> None:
            with suppress(OSError, ValueError):  # nobody reads our output any more
                self._display.print(prefix + line, to_stderr=to_stderr)

        if pipe is not None:
            child.streams.append(Stream(pipe, show))

    def _drain(self, children: list[Child]) -> None:
        deadline = time.monotonic() + _DRAIN_S
        for child in children:
            for stream in child.streams:
                stream.join(max(0.0, deadline - time.monotonic()))
