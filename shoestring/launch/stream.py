"""Pass on what a process prints, line by line, and remember the last of it."""

import threading
from collections import deque
from collections.abc import Callable
from typing import IO

KEPT_LINES = 8
_LINE_BYTES = 1 << 16  # a longer line is passed on in pieces


class Stream:
    """Reads a pipe to its end in a thread of its own."""

    def __init__(self, pipe: IO[bytes], show: Callable[[str], None]) -> None:
        self.last: deque[str] = deque(maxlen=KEPT_LINES)
        self._pipe = pipe
        self._show = show
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        """Wait until all was passed on; a grandchild may keep the pipe open for longer."""
        self._thread.join(timeout_s)

    def _read(self) -> None:
        with self._pipe:
            while line := self._pipe.readline(_LINE_BYTES):
                # Of a progress bar, which draws over itself, only the last state is of use.
                text = line.decode(errors="replace").rstrip("\r\n").rpartition("\r")[2]
                self.last.append(text)
                self._show(text)
