"""The processes a benchmark runs: started on hosts, told what to do, ended with it."""

import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from typing import IO, Any

from shoestring.bench.link.hosts import Hosts
from shoestring.errors import ShoestringError

PATIENCE_S = 180.0
_LEAVE_S = 10.0


class Peer:
    """One process that answers each line of JSON with another."""

    def __init__(self, name: str, process: "subprocess.Popen[str]", complaints: IO[bytes]) -> None:
        self.name = name
        self._process = process
        self._complaints = complaints
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def tell(self, **command: Any) -> None:
        """Send a command."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended: `hear` says why
            print(json.dumps(command), file=self._process.stdin, flush=True)

    def hear(self) -> dict[str, Any]:
        """Wait for the answer to the oldest command that has none yet."""
        try:
            line = self._lines.get(timeout=PATIENCE_S)
        except queue.Empty:
            line = ""
        answer = json.loads(line) if line else None
        if not isinstance(answer, dict) or "error" in answer:
            self._complaints.seek(0)
            last = self._complaints.read().decode(errors="replace").strip().splitlines()[-1:]
            what = answer["error"] if isinstance(answer, dict) else " ".join(last) or "it gave no answer"
            raise ShoestringError(
                f"{self.name} of the benchmark failed: {what}",
                hint=answer["hint"] if isinstance(answer, dict) else "please report this",
            )
        return answer

    def ask(self, **command: Any) -> dict[str, Any]:
        self.tell(**command)
        return self.hear()

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

    def close(self) -> None:
        """End the process: kindly, then not."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(_LEAVE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._thread.join()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._lines.put(line)
        self._lines.put("")


@contextlib.contextmanager
def started(
    hosts: Hosts, host: int, name: str, told: dict[str, Any], module: str = "shoestring.bench.wire.peer"
) -> Iterator[Peer]:
    """Start one process on a host; it ends with the context."""
    words = [sys.executable, "-m", module, json.dumps(told)]
    with tempfile.TemporaryFile() as complaints:
        process = subprocess.Popen(
            hosts.command(host, *words),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=complaints,
            text=True,
            # Threads that wait without spinning: much faster where something else runs too.
            env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"},
        )
        peer = Peer(name, process, complaints)
        try:
            yield peer
        finally:
            peer.close()


def ask_all(peers: Sequence[Peer], **command: Any) -> list[dict[str, Any]]:
    """Have all do the same at once; return their answers."""
    for peer in peers:
        peer.tell(**command)
    return [peer.hear() for peer in peers]
