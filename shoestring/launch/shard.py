"""What a shard's process is told, and how it says where it listens.

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
from typing import IO

from shoestring.config import Run, settings
from shoestring.errors import JoinError

_IPC_BYTES = 100  # the kernel takes a few more


@dataclass(frozen=True)
class ShardArguments:
    """The command line of one shard of a run."""

    index: int
    shards: int
    run: Run
    address: str
    threads: int = 1
    linger: bool = False  # when the parent is gone, serve on until no worker is left

    def command(self, lifeline: int) -> list[str]:
        """The command that runs this shard under the interpreter of this process."""
        given = {
            "--address": self.address,
            "--shard": str(self.index),
            "--shards": str(self.shards),
            "--run": self.run.name,
            "--threads": str(self.threads),
            "--lifeline": str(lifeline),
        }
        for setting in settings(Run):
            if setting.about.is_for_shards:
                given[setting.option] = setting.text(getattr(self.run, setting.name))
        options = [text for name, value in given.items() if value for text in (name, value)]
        return [
            sys.executable, "-m", "shoestring", "serve", *options,
            *(["--linger"] if self.linger else []), "--json",
        ]  # fmt: skip


def read_address(
    index: int, process: "subprocess.Popen[bytes]", answer: IO[bytes] | None, timeout_s: float
) -> str:
    """Wait until a shard says where it listens; kill it when it does not."""
    overdue = threading.Timer(timeout_s, process.kill)
    overdue.daemon = True
    overdue.start()
    try:
        line = answer.readline(4096) if answer is not None else b""
    finally:
        overdue.cancel()
    with suppress(ValueError, KeyError, TypeError):
        return str(json.loads(line)["address"])
    process.kill()
    code = process.wait()
    raise JoinError(
        f"shard {index} ended with exit code {code} before it listened",
        hint="its own error is above; `shoestring serve` starts it alone",
    )


def local_address(folder: Path, index: int) -> str:
    """An address that only this user's processes reach, or only this machine's where that is too long."""
    path = folder / f"shard-{index}"
    if len(os.fsencode(path)) > _IPC_BYTES:
        return "tcp://127.0.0.1:0"
    return f"ipc://{path}"
