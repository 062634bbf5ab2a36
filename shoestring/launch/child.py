"""A process of a run with the group of its children, ended together."""

import os
import signal
import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress

from shoestring.launch.stream import Stream


class Child:
    """A process that leads its own group. When it has ended, what it left behind is killed too."""

    def __init__(
        self, who: str, process: "subprocess.Popen[bytes]", on_end: Callable[["Child"], None]
    ) -> None:
        self.who = who
        self.process = process
        self.streams: list[Stream] = []
        self.ended = threading.Event()
        self._on_end = on_end
        threading.Thread(target=self._wait, daemon=True).start()

    @property
    def code(self) -> int:
        """The exit code as a shell counts it: 128 and the signal for one that was killed."""
        code = self.process.returncode
        return code if code >= 0 else 128 - code

    def signal(self, number: signal.Signals) -> None:
        """Signal the process and its children, such as data loaders, if it has not ended."""
        with suppress(ProcessLookupError, PermissionError):
            if not self.ended.is_set():
                os.killpg(self.process.pid, number)

    def end(self, grace_s: float) -> None:
        """Ask it to end, and kill it when it has not within `grace_s`; returns when it is gone."""
        self.signal(signal.SIGTERM)
        if not self.ended.wait(grace_s):
            self.signal(signal.SIGKILL)
            self.ended.wait()

    def _wait(self) -> None:
        # Before its number may be used again: children it has left behind are of no use to anyone.
        with suppress(ChildProcessError):
            os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
        self.signal(signal.SIGKILL)
        self.process.wait()
        self.ended.set()
        self._on_end(self)
