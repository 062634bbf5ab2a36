"""Start the command line as a user does, and find out whether anything of it is left."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil

LIMIT_S = 180.0

# A worker that says it is there and then waits for ever; it needs no torch.
WAITING = """
import signal
from shoestring.launch.start import init

run = init()
print("ready", run.worker, run.workers, flush=True)
while True:
    signal.pause()
"""


class Command:
    """`shoestring ARGS...` in a process of its own, killed at the latest when the `with` ends."""

    def __init__(self, *args: str | Path, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "shoestring", *map(str, args)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=clean_environment() | environment,
        )
        self._overdue = threading.Timer(LIMIT_S, self.process.kill)
        self._children: list[psutil.Process] = []

    def __enter__(self) -> "Command":
        self._overdue.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._overdue.cancel()
        self.process.kill()
        self.process.communicate()
        for child in self._children:
            if is_alive(child):
                child.kill()

    def read_line(self) -> str:
        """The next line of its stdout."""
        return self.process.stdout.readline().rstrip("\n")

    def note_children(self) -> list[psutil.Process]:
        """All processes below it, as they are now."""
        self._children = psutil.Process(self.process.pid).children(recursive=True)
        return self._children

    def finish(self, number: signal.Signals | None = None) -> tuple[int, str, str]:
        """Send a signal, if one is given, and wait for the end: exit code, stdout and stderr."""
        if number is not None:
            self.process.send_signal(number)
        out, err = self.process.communicate(timeout=LIMIT_S)
        return self.process.returncode, out, err


def run_command(*args: str | Path, **environment: str) -> tuple[int, str, str]:
    with Command(*args, **environment) as command:
        return command.finish()


def clean_environment() -> dict[str, str]:
    """This environment without anything that tells a process of a run."""
    prefixes = (
        "SHOESTRING_",
        "SLURM_",
        "TORCHELASTIC_",
        "RANK",
        "WORLD_SIZE",
        "LOCAL_",
        "MASTER_",
        "FORCE_COLOR",
    )
    return {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}


def is_alive(process: psutil.Process) -> bool:
    """A process whose parent died before it may stay a zombie: that has ended."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_gone(processes: list[psutil.Process], timeout_s: float = 30.0) -> list[psutil.Process]:
    """Wait until these have ended; return those that have not."""
    deadline = time.monotonic() + timeout_s
    left = list(processes)
    while (left := [process for process in left if is_alive(process)]) and time.monotonic() < deadline:
        psutil.wait_procs(left[:1], timeout=0.1)
    return left
