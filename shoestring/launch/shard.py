"""Start one shard as a process of its own, and learn where it listens.

The shard ends when the process that started it does, whichever way that is.
"""

import json
import os
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shoestring.errors import JoinError
from shoestring.launch.lifeline import Lifeline

READY_S = 600.0  # the first shard on a machine compiles its kernels; on a slow and busy one that takes
_IPC_BYTES = 100  # the kernel takes a few more


@dataclass(frozen=True)
class ShardOrder:
    """What a shard is told on its command line."""

    index: int
    shards: int
    run: str
    address: str
    threads: int = 1
    keys: Path | None = None
    checkpoint: Path | None = None
    resume: Path | None = None
    folder: Path | None = None
    linger: bool = False  # when the parent is gone, serve on until no worker is left

    def command(self, lifeline: int) -> list[str]:
        """The command that runs this shard under the interpreter of this process."""
        given = {
            "--address": self.address,
            "--shard": str(self.index),
            "--shards": str(self.shards),
            "--run": self.run,
            "--threads": str(self.threads),
            "--keys": str(self.keys or ""),
            "--checkpoint": str(self.checkpoint or ""),
            "--resume": str(self.resume or ""),
            "--folder": str(self.folder or ""),
            "--lifeline": str(lifeline),
        }
        options = [text for name, value in given.items() if value for text in (name, value)]
        return [
            sys.executable, "-m", "shoestring", "serve", *options,
            *(["--linger"] if self.linger else []), "--json",
        ]  # fmt: skip


class ShardProcess:
    """A shard that was started and may not listen yet."""

    def __init__(self, order: ShardOrder, lifeline: Lifeline, *, stderr: int | None = None) -> None:
        self.order = order
        # What is set for workers, such as their lifeline, is not for a shard.
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith("SHOESTRING_")
        }
        self.process = subprocess.Popen(
            order.command(lifeline.reader),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=environment,
            pass_fds=[lifeline.reader],
            process_group=0,  # Ctrl-C is for the launcher, which tells the shard
        )

    def wait_ready(self, timeout_s: float = READY_S) -> str:
        """Return the address it listens on."""
        overdue = threading.Timer(timeout_s, self.process.kill)
        overdue.daemon = True
        overdue.start()
        try:
            line = self.process.stdout.readline(4096) if self.process.stdout is not None else b""
        finally:
            overdue.cancel()
        with suppress(ValueError, KeyError, TypeError):
            return str(json.loads(line)["address"])
        self.process.kill()
        code = self.process.wait()
        raise JoinError(
            f"shard {self.order.index} ended with exit code {code} before it listened",
            hint="its own error is above; `shoestring serve` starts it alone",
        )


def local_address(folder: Path, index: int) -> str:
    """An address that only this user's processes reach, or only this machine's where that is too long."""
    path = folder / f"shard-{index}"
    if len(os.fsencode(path)) > _IPC_BYTES:
        return "tcp://127.0.0.1:0"
    return f"ipc://{path}"
