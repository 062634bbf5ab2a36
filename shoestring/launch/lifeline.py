"""A pipe by which a process notices that the one that started it is gone, however it went.

The parent keeps the writing end and never writes; children hold the reading end. When the
parent ends, by SIGKILL too, the kernel closes the pipe and every child reads its end.
"""

import os
import stat
import threading
from collections.abc import Callable

VARIABLE = "SHOESTRING_LIFELINE"  # the number of the file descriptor, for a worker


class Lifeline:
    """The parent's side. Give `reader` to children with `pass_fds`."""

    def __init__(self) -> None:
        self.reader, self._writer = os.pipe()  # neither is inherited unless it is passed on

    def close(self) -> None:
        """Let go; children that are still there notice. May be called again."""
        for descriptor in (self.reader, self._writer):
            if descriptor >= 0:
                os.close(descriptor)
        self.reader = self._writer = -1


def watch(descriptor: int, on_end: Callable[[], None]) -> None:
    """Call `on_end` in a thread of its own once the parent is gone.

    A number that is no pipe was meant for another process, and nothing is watched.
    """
    try:
        if not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            return
    except OSError:
        return
    os.set_inheritable(descriptor, False)

    def wait() -> None:
        while os.read(descriptor, 1):
            pass
        on_end()

    threading.Thread(target=wait, name="lifeline", daemon=True).start()
