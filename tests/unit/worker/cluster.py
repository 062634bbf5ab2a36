"""Shards and workers in threads of one process, over real sockets on loopback."""

import contextlib
import secrets
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import zmq

from shoestring.checkpoint.shard import ShardWriter
from shoestring.checkpoint.snapshot import Snapshot
from shoestring.config import Run
from shoestring.observe.events import EventLog
from shoestring.server.saving import restorer
from shoestring.server.serve import Service, listen
from shoestring.server.shard import Shard
from shoestring.worker.session import Session


class Cluster:
    """A run's shards, listening on loopback, and a way to be its workers."""

    def __init__(self, workers: int, shards: int, *, ipc: bool = False, **settings: Any) -> None:
        self._ipc = ipc
        self.run = Run(name="test", workers=workers, **settings)
        self.shards = [Shard(index, shards, "test", is_sharing=ipc) for index in range(shards)]
        if self.run.resume is not None:
            for shard in self.shards:
                shard.restore = restorer(Snapshot(self.run.resume))
        self.addresses: tuple[str, ...] = ()
        self._open = contextlib.ExitStack()

    def __enter__(self) -> "Cluster":
        context: zmq.SyncContext = self._open.enter_context(zmq.Context())
        addresses = []
        folder = self._open.enter_context(tempfile.TemporaryDirectory())
        for shard in self.shards:
            listener = listen(context, f"ipc://{folder}/{shard.index}" if self._ipc else "tcp://127.0.0.1:0")
            self._open.callback(listener.close)
            root = self.run.checkpoint
            writer = None if root is None else ShardWriter(root, shard.index)
            service = Service(shard, listener, writer=writer)
            thread = threading.Thread(target=service.run, daemon=True)
            thread.start()
            self._open.callback(thread.join)
            self._open.callback(service.stop)
            addresses.append(listener.address)
        self.addresses = tuple(addresses)
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    @contextlib.contextmanager
    def session(self, worker: int, **settings: Any) -> Iterator[Session]:
        """One worker's session."""
        run = replace(self.run, worker=worker, shards=self.addresses, **settings)
        here = Session(run, secrets.token_hex(8), EventLog(None, "test"))
        try:
            yield here
        finally:
            here.close()

    def train(self, be_worker: Callable[[Session], Any]) -> list[Any]:
        """Run every worker in a thread of its own; return what each returns, or raise what one raised."""
        results: list[Any] = [None] * self.run.workers
        errors: list[BaseException] = []

        def body(worker: int) -> None:
            try:
                with self.session(worker) as here:
                    results[worker] = be_worker(here)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=body, args=(worker,)) for worker in range(self.run.workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return results
