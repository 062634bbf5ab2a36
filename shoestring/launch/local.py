"""Run a script as several workers on this machine, with shards beside them.

Promises: when `run_local` returns or raises, none of the processes it started is left, nor
their children; when the launcher itself is killed they end by themselves. The first worker
that fails ends the run, and its exit code is the run's.
"""

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from shoestring.config import Run
from shoestring.launch.group import KeptPort, group_variables, without_torchruns
from shoestring.launch.outcome import Failure, Outcome
from shoestring.launch.shard import ShardArguments, local_address
from shoestring.launch.signals import signals_as_exceptions, signals_ignored
from shoestring.launch.supervisor import Child, Supervisor
from shoestring.observe.events import Tail
from shoestring.observe.progress import Board, Display

_LOOK_S = 0.25

Reach = Callable[[int, Sequence[str]], tuple[str, ...]]


def run_local(
    command: list[str], run: Run, *, shards: int, threads: int | None = None, reach: Reach | None = None
) -> Outcome:
    """Run `command` once for each of the run's workers, and wait for all of them.

    `run.folder` must be given; `run.shards`, `run.worker`, `run.local` and `run.incarnation` are
    filled in. `threads` is what each worker may compute with; by default they share the cores.
    `reach` may put something between: it gets a worker and the shards' TCP addresses, and returns
    those that the worker is to use.
    """
    local = _LocalRun(command, run, shards, threads, reach)
    began = time.monotonic()
    with signals_as_exceptions():
        try:
            local.start()
            local.wait()
        finally:
            with signals_ignored():
                local.stop()
    local.outcome.seconds = time.monotonic() - began
    return local.outcome


class _LocalRun:
    """A run on this machine: its processes, what they print and how far they are."""

    def __init__(
        self, command: list[str], run: Run, shards: int, threads: int | None, reach: Reach | None
    ) -> None:
        self.outcome = Outcome(exit_codes=[None] * run.workers)
        self._command = command
        self._run = run
        self._count = shards
        self._threads = threads
        self._reach = reach
        self._folder = Path(tempfile.mkdtemp(prefix="shoestring-"))
        self._group_port = KeptPort()  # for a script's own process group
        self._workers: list[Child] = []
        self._board = Board()
        self._display = Display(self._board)
        self._tail = Tail(run.folder) if run.folder is not None else None
        self._supervisor = Supervisor(self._show)

    def start(self) -> None:
        """Start the shards, and when they listen the workers."""
        run, cores = self._run, len(os.sched_getaffinity(0))
        if self._tail is not None:
            self._tail.poll()  # what an earlier run in the same folder did
        starting = [
            self._supervisor.start_shard(
                ShardArguments(
                    index,
                    self._count,
                    run,
                    local_address(self._folder, index) if self._reach is None else "tcp://127.0.0.1:0",
                    threads=max(1, cores // (run.workers + self._count)),
                )
            )
            for index in range(self._count)
        ]
        run = replace(run, shards=tuple(shard.wait_ready(run.ready_timeout_s) for shard in starting))
        environment = without_torchruns(os.environ)
        if self._threads is not None or "OMP_NUM_THREADS" not in environment:
            environment["OMP_NUM_THREADS"] = str(self._threads or max(1, cores // run.workers))
        for worker in range(run.workers):
            shards = run.shards if self._reach is None else self._reach(worker, run.shards)
            own = replace(run, worker=worker, local=worker, shards=shards, incarnation=1)
            group = group_variables(own, run.workers, self._group_port.host, self._group_port.port)
            self._workers.append(self._supervisor.start_worker(self._command, own, environment | group))

    def wait(self) -> None:
        """Return when all workers have ended, or one process has failed."""
        left = len(self._workers)
        while left:
            child = self._supervisor.next_ended(_LOOK_S)
            if child is not None:
                left -= child in self._workers
                if child.code != 0:
                    child.drain()
                    self.outcome.failure = Failure(child.who, child.code, child.last_lines)
                    return
            self._look()

    def stop(self) -> None:
        """End what is left, wait for it, and clean up. A shard may have a checkpoint half written."""
        is_well = bool(self._workers) and all(
            child.ended.is_set() and child.code == 0 for child in self._workers
        )
        self._supervisor.stop(self._run.save_timeout_s if is_well else self._run.stop_grace_s)
        self._look()
        self._display.close()
        self.outcome.count(self._board)
        self._group_port.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        for worker, child in enumerate(self._workers):
            self.outcome.exit_codes[worker] = child.code

    def _look(self) -> None:
        if self._tail is not None:
            for event in self._tail.poll():
                self._board.add(event)
        self._display.refresh()

    def _show(self, child: Child, line: str, is_err: bool) -> None:
        prefix = "" if child.who == "worker 0" else f"[{child.who}] "
        with suppress(OSError, ValueError):  # nobody reads our output any more
            self._display.print(prefix + line, to_stderr=is_err)
