"""The process around a shard: sockets, threads and time.

One thread owns the socket and the protocol, which is a `Shard` for each of the models that the workers
train; a pool computes updates, one part each,
without the GIL. What cannot be sent at once (a worker that is gone, or reads too slowly)
is dropped: the worker asks again. So memory is bounded by the replies of a round and the
socket's own queue, whatever the workers do.
"""

import contextlib
import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import zmq

from shoestring.checkpoint.shard import ShardWriter
from shoestring.errors import DamagedError, JoinError, ShoestringError, WireError
from shoestring.server.saving import marks_of, values_of
from shoestring.server.shard import Shard
from shoestring.server.work import Work
from shoestring.wire import frames
from shoestring.wire.identity import model_of
from shoestring.wire.keys import ShardKeys
from shoestring.wire.link import Listener
from shoestring.wire.messages import OF_FOLLOWERS

QUEUED = 4096  # messages for one peer; a round is a few for each part
_TICK_MS = 250
_BATCH = 256  # messages taken before replies are sent
_READS_ONLY = JoinError(
    "this key may only follow the run",
    hint="use a key whose name does not begin with `follower`",
)
_GOODBYE_S = 0.2  # between the last goodbye and the end of its connection, which would drop it unread


def listen(context: zmq.SyncContext, address: str, *, keys: ShardKeys | None = None) -> Listener:
    """Open a shard's socket with the limits that every run keeps to."""
    limit = frames.PAYLOAD_LIMIT
    return Listener(context, address, keys=keys, max_message_bytes=limit, max_queued=QUEUED)


class Service:
    """Serves one shard on one socket until it is told to stop.

    `shard` is that of the first model; those of further models are made like it.
    """

    def __init__(
        self,
        shard: Shard,
        listener: Listener,
        *,
        threads: int = 1,
        writer: ShardWriter | None = None,
        report: Callable[..., None] = lambda event, **fields: None,
    ) -> None:
        self.shard = shard
        self._shards = {0: shard}  # by the number of the model
        self.writer = writer
        self.threads = threads
        self.bad_messages = 0
        self.dropped = 0
        self._listener = listener
        self._socket = listener.socket
        self._report = report
        self._alarm = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)  # wakes the thread that serves
        weakref.finalize(self, os.close, self._alarm)  # nobody can write to it any more
        self._done: deque[Callable[[], None]] = deque()
        self._running = 0
        self._stopping = False
        self._is_lingering = False
        self.ending = threading.Event()
        if writer is not None:
            writer.on_written = self._written

    def stop(self, *, when_unneeded: bool = False) -> None:
        """Make `run` return: soon, or once no worker is here. Any thread or signal handler may call it."""
        if when_unneeded:
            self._is_lingering = True
        else:
            self._stopping = True
        self._wake()

    def _wake(self) -> None:
        os.eventfd_write(self._alarm, 1)

    def run(self, *, until_all_left: bool = False) -> None:
        """Serve. With `until_all_left`, return once every worker has come and gone."""
        left_at = math.inf
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._alarm, zmq.POLLIN)
        try:
            with ThreadPoolExecutor(self.threads, "update") as pool:
                while not self._stopping:
                    poller.poll(_TICK_MS)
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(self._alarm)
                    is_drained = self._receive()
                    while self._done:
                        self._done.popleft()()
                    if is_drained:  # else leases would run out on messages that are here
                        self._tick()
                    self._start_work(pool)
                    self._send()
                    self._show()
                    now = time.monotonic()
                    left_at = min(left_at, now) if self._all_left() else math.inf
                    if until_all_left and now - left_at >= _GOODBYE_S:
                        break
                    if self._is_lingering and not self._is_needed():
                        break
                self._say_over()
        finally:
            self.ending.set()
            if self.writer is not None:
                self.writer.close()
            for shard in self._shards.values():
                shard.close()

    def _show(self) -> None:
        """Send followers one part while workers compute: these do not wait until it is copied."""
        if not self._is_followed() or self._running or self._done or self._socket.poll(0):
            return
        if any(shard.show_next() for shard in self._shards.values()):
            self._send()
            self._wake()  # there may be more

    def _say_over(self) -> None:
        """Tell followers that the shard ends, and leave them a moment to hear it."""
        if self._is_followed():
            for shard in self._shards.values():
                while shard.show_next():
                    pass
                shard.end()
            self._send()
            time.sleep(_GOODBYE_S)

    def _receive(self) -> bool:
        for _ in range(_BATCH):
            received = self._listener.receive()
            if received is None:
                return True
            sender, rest = received[0].bytes, [frame.buffer for frame in received[1:]]
            shard = self._shard_of(sender)
            try:
                message, payload = frames.decode(rest)
            except WireError as error:
                self.bad_messages += 1
                self._report("bad_message", text=error.message)
                if not isinstance(error, DamagedError):  # it would come again as it is
                    shard.refuse(sender, error)
                continue
            if not (isinstance(message, OF_FOLLOWERS) or self._listener.may_push(received)):
                shard.refuse(sender, _READS_ONLY)
                continue
            shard.handle(sender, message, payload, time.monotonic())
        return False

    def _shard_of(self, sender: bytes) -> Shard:
        """The shard of the model that a connection is for."""
        model = model_of(sender)
        if model is None:
            model = 0  # which does not know the sender, and says so
        if model not in self._shards:
            self._shards[model] = self.shard.beside()
        return self._shards[model]

    def _tick(self) -> None:
        for model, shard in list(self._shards.items()):
            shard.tick(time.monotonic())
            # Of a run's first model, or the one that it goes on as; others come and go meanwhile.
            if model == min((n for n, one in self._shards.items() if not one.moved), default=0):
                for worker in shard.departed:
                    self._report("leave", worker=worker)
            shard.departed.clear()
            is_over = shard.members.have_all_come and not any(one.present for one in shard.members)
            if (model or shard.moved) and is_over and shard.is_followed:
                while shard.show_next():
                    pass
                shard.end()
            if model and is_over and not shard.outbox:  # the last goodbye is answered
                shard.close()
                del self._shards[model]

    def _start_work(self, pool: ThreadPoolExecutor) -> None:
        for shard in self._shards.values():
            while self._running < self.threads:
                work = shard.next_work()
                if work is None:
                    break
                self._running += 1
                try:
                    pool.submit(self._compute, shard, work)
                except RuntimeError:  # the interpreter is ending: no pool takes work any more
                    self._compute(shard, work)

    def _compute(self, shard: Shard, work: Work) -> None:
        error: ShoestringError | None = None
        try:
            work.run()
        except ShoestringError as caught:
            error = caught
        except Exception as caught:  # a fault of ours must reach the workers, not end a thread in silence
            error = ShoestringError(
                f"shard {self.shard.index} failed: {caught!r}", hint="please report this with the event log"
            )
        self._done.append(lambda: self._finish(shard, work, error))
        self._wake()

    def _finish(self, shard: Shard, work: Work, error: ShoestringError | None) -> None:
        self._running -= 1
        if error is not None:
            self._report("warn", text=error.message)
            shard.fail(work, error)
            return
        is_saved = work.reply is not None and work.is_saved
        shard.finish(work)
        if is_saved and self.writer is not None:
            parts = (values_of(rounds.holding) for rounds in shard.parts.values())
            self.writer.capture(work.seq, values_of(work.rounds.holding), marks_of(work.rounds), parts)

    def _written(self, seq: int, record: bytes | None, why: str) -> None:
        if record is None:
            self._done.append(lambda: self.shard.not_saved(seq, why))
        else:
            self._done.append(lambda: self.shard.saved(seq, record))
        self._wake()

    def _send(self) -> None:
        for shard in self._shards.values():
            outbox = shard.outbox
            while outbox:
                identity, message, payload = outbox.popleft()
                header, body = frames.encode(message, payload)
                try:
                    self._socket.send_multipart([identity, header, body], zmq.NOBLOCK, copy=False)
                except zmq.ZMQError as error:
                    if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                        raise
                    self.dropped += 1

    def _is_needed(self) -> bool:
        return any(member.present for shard in self._shards.values() for member in shard.members)

    def _is_followed(self) -> bool:
        return any(shard.is_followed for shard in self._shards.values())

    def _all_left(self) -> bool:
        return self.shard.members.have_all_come and not self._is_needed()
