"""One process of `python -m benchmarks.scale`: a shard or a worker of one run after the other.

Speaks lines of JSON as the processes of `bench wire` do. It tells how much processor time
each of its threads has taken. Rounds begin at a time that is given: the monotonic clock is
the same for all processes of a machine.
"""

import contextlib
import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import zmq

from shoestring.bench.wire.peer import Worker, obey, rehearse, take_stdout
from shoestring.errors import ShoestringError
from shoestring.server.serve import Service, listen
from shoestring.server.shard import Shard
from shoestring.wire.keys import keys_from_folder


def thread_seconds(threads: Path = Path("/proc/self/task")) -> dict[str, float]:
    """The processor seconds of this process: of I/O threads, and of all others by their name.

    Names end at an underscore, so that a pool counts as one.
    """
    names = {thread.native_id: thread.name.partition("_")[0] for thread in threading.enumerate()}
    found: dict[str, float] = {}
    for entry in threads.iterdir():
        with contextlib.suppress(OSError):  # a thread that has just ended
            name = names.get(int(entry.name), "other")
            if (entry / "comm").read_text().startswith("ZMQ"):
                name = "io"
            spent_s = 1e-9 * int((entry / "schedstat").read_text().split()[0])
            found[name] = found.get(name, 0.0) + spent_s
    return found


class ShardPeer:
    """Serves one shard at a time, in a thread."""

    def __init__(self) -> None:
        self._stop: Callable[[], None] = lambda: None
        self._before = 0

    def serve(self, told: dict[str, Any]) -> dict[str, Any]:
        """Begin to serve a shard of a run."""
        context: zmq.SyncContext = zmq.Context()
        listener = listen(context, told["address"], keys=keys_from_folder(Path(told["keys"]), "shard"))
        service = Service(
            Shard(told["index"], told["shards"], told["run"]), listener, threads=told["threads"]
        )
        self._before = psutil.Process().memory_info().rss
        thread = threading.Thread(target=service.run, name="service")
        thread.start()

        def stop() -> None:
            service.stop()
            thread.join()
            listener.close()
            context.term()

        self._stop = stop
        return {"address": listener.address}

    def usage(self, told: dict[str, Any]) -> dict[str, Any]:
        """Tell what the threads have taken so far, and how much memory the run has."""
        taken = psutil.Process().memory_info().rss - self._before
        return {"seconds": thread_seconds(), "memory": taken}

    def end(self, told: dict[str, Any]) -> dict[str, Any]:
        """Stop serving."""
        self._stop()
        self._stop = lambda: None
        return {}

    def close(self) -> None:
        self._stop()


class RoundWorker(Worker):
    """A worker whose rounds begin when it is told."""

    def prepare(self, codec: str) -> dict[str, Any]:
        """Set the gradients of the next round."""
        _, optimizer = self._runs[codec]
        self.set_gradients(optimizer, optimizer.steps + 1)
        return {"seconds": thread_seconds()}

    def round(self, codec: str, at: float) -> dict[str, Any]:
        """Take part in a round; tell when it ended here, and what it took."""
        _, optimizer = self._runs[codec]
        traffic = optimizer.driver.coder.exchange.traffic
        up, down = traffic.up, traffic.down
        time.sleep(max(0.0, at - time.monotonic()))  # all workers begin at the moment they were given
        optimizer.step()
        ended = time.monotonic()
        return {
            "ended": ended,
            "up": traffic.up - up,
            "down": traffic.down - down,
            "seconds": thread_seconds(),
        }


class WorkerPeer:
    """A worker of one run after the other, each with its own model and number of workers."""

    def __init__(self) -> None:
        import torch  # before it is ready: it takes a while

        torch.set_num_threads(1)
        self._worker: RoundWorker | None = None

    @property
    def worker(self) -> RoundWorker:
        if self._worker is None:
            raise ShoestringError("a worker of the benchmark is in no run", hint="please report this")
        return self._worker

    def enter(self, told: dict[str, Any]) -> dict[str, Any]:
        """Enter a run."""
        self._worker = RoundWorker({**told, "store": ""})
        return self.worker.join(told)

    def prepare(self, told: dict[str, Any]) -> dict[str, Any]:
        return self.worker.prepare(told["codec"])

    def round(self, told: dict[str, Any]) -> dict[str, Any]:
        return self.worker.round(told["codec"], told["at"])

    def digest(self, told: dict[str, Any]) -> dict[str, Any]:
        return self.worker.digest(told)

    def leave(self, told: dict[str, Any]) -> dict[str, Any]:
        """Leave the run and forget its model."""
        self.worker.leave(told)
        self._worker = None
        return {}

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()


def main() -> None:
    say = take_stdout()
    told = json.loads(sys.argv[1])
    rehearse(told["codecs"])
    peer: ShardPeer | WorkerPeer
    if told["be"] == "shard":
        peer = ShardPeer()
        actions = {"serve": peer.serve, "usage": peer.usage, "end": peer.end}
    else:
        peer = WorkerPeer()
        actions = {
            "enter": peer.enter, "prepare": peer.prepare, "round": peer.round,
            "digest": peer.digest, "leave": peer.leave,
        }  # fmt: skip
    try:
        obey(actions, say)
    except ShoestringError as error:
        say({"error": error.message, "hint": error.hint})
        sys.exit(1)
    finally:
        peer.close()


if __name__ == "__main__":
    main()
