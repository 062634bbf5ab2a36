"""Wake a thread that waits on sockets, from another thread."""

import contextlib
import socket


class Waker:
    """A file descriptor that becomes readable when `wake` is called, until `clear`."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def fileno(self) -> int:
        return self._reader.fileno()

    def wake(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):  # full: it is awake already; closed: nobody waits
            self._writer.send(b"\0")

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._reader.recv(4096):
                pass

    def close(self) -> None:
        self._reader.close()
        self._writer.close()
