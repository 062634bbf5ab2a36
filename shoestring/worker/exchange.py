"""Talk to the shards from a thread of its own, so that training need not wait.

This file holds sockets, the thread and time; what is said to whom is decided by
`protocol/worker.py`. The training thread submits pushes and collects answers. Values are read and
written only where the training thread allows it: a push is read when it is submitted or soon after,
before `wait_sent` returns; answers change parameters only inside `collect`.
"""

import math
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import zmq

from shoestring.codec.base import Vector
from shoestring.errors import ShoestringError, WireError
from shoestring.wire import frames
from shoestring.wire import messages as say
from shoestring.wire.messages import Message
from shoestring.worker.memory import SharedMemory
from shoestring.worker.protocol.worker import BEAT_S, Answer, Give, Worker, nothing

_MEASURED_BYTES = 1 << 17  # of a beat that measures a link's rate
_LEAVE_S = 5.0  # how long a worker waits for its goodbye to be heard

Frames = tuple[bytes, frames.Buffer]
Encode = Callable[[], tuple[say.Push, memoryview]]
Task = Callable[[float], None]  # called in the exchange's thread with the time


@dataclass
class Traffic:
    """Bytes on the wire, and what they would be as float32."""

    up: int = 0
    down: int = 0
    up_float: int = 0
    down_float: int = 0

    def add(self, other: "Traffic") -> None:
        """Count another connection's bytes as well."""
        self.up, self.down = self.up + other.up, self.down + other.down
        self.up_float, self.down_float = self.up_float + other.up_float, self.down_float + other.down_float


@dataclass
class _Line:
    """The connection to one shard, and what was measured of it."""

    index: int
    address: str
    socket: "zmq.Socket[bytes]"
    first: Frames | None = None  # the first message, until the connection is there
    is_open: bool = False
    # Of the last few looks the best counts: other traffic only makes a link look slower.
    rtts_s: deque[float] = field(default_factory=lambda: deque(maxlen=8))
    rates: deque[float] = field(default_factory=lambda: deque(maxlen=3))

    @property
    def rtt_s(self) -> float:
        return min(self.rtts_s, default=0.0)

    @property
    def rate(self) -> float:
        """Bytes a second, each way. What does not leave the machine is not held up by a link."""
        if self.address.startswith(("ipc:", "inproc:")):
            return math.inf
        return max(self.rates, default=math.inf)

    def measure(self, size: int, elapsed_s: float) -> None:
        """Note how long a beat of so many bytes took there and back."""
        if size:
            self.rates.append(2 * size / max(elapsed_s - self.rtt_s, 1e-4))
        else:
            self.rtts_s.append(elapsed_s)


class Exchange:
    """One worker's connections to all shards."""

    def __init__(
        self,
        sockets: Sequence[tuple[str, "zmq.Socket[bytes]"]],
        sizes: Sequence[int],
        protocol: Callable[[float], Worker],
        memory: SharedMemory,
        *,
        notice: Callable[[str], None],
    ) -> None:
        self.traffic = Traffic()
        self._lines = [_Line(index, address, socket) for index, (address, socket) in enumerate(sockets)]
        self._sizes = sizes
        self._protocol = protocol(time.monotonic())
        self._used = [self._lines[shard] for shard in sorted(self._protocol.holders)]
        self._memory = memory
        self._notice = notice
        self._tasks: deque[Task] = deque()
        self._echoes: dict[float, threading.Event] = {}  # of beats that measure, by when they were sent
        self._unsent = 0
        self._changed = threading.Condition()
        self._inbox: queue.SimpleQueue[Answer | ShoestringError | str] = queue.SimpleQueue()
        self._alarm = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)  # wakes the exchange's thread
        weakref.finalize(self, os.close, self._alarm)  # nobody can write to it any more
        self._stop_at = math.inf
        self._failure: ShoestringError | None = None
        self._thread = threading.Thread(target=self._run, name="exchange", daemon=True)

    def enter(self, apply: Callable[[Answer], None]) -> int:
        """Join the run; answers bring each part as the shards hold it. Returns the first round."""
        self._thread.start()
        self.collect(0, apply)
        return self._protocol.joining.first_round

    def rates(self) -> list[float]:
        """The rate of the link to each shard as last measured, in bytes a second."""
        return [line.rate for line in self._lines]

    @property
    def rtt_s(self) -> float:
        """The longest time to a shard with parts and back that was seen of late."""
        return max(line.rtt_s for line in self._used)

    def measure_links(self) -> None:
        """Measure the links that are used, one after the other; returns when these shards have answered."""
        for line in self._used:
            for size in (0, 0, _MEASURED_BYTES, _MEASURED_BYTES):
                echoed = threading.Event()
                while not echoed.is_set():  # a beat may be lost, too
                    self._do(partial(self._beat, line, size, echoed))
                    echoed.wait(5 * BEAT_S)
                    self._raise()

    def measure_links_soon(self) -> None:
        """Measure the rates of the links again, without waiting for it."""
        for line in self._used:
            self._do(partial(self._beat, line, _MEASURED_BYTES, threading.Event()))

    def submit(self, part: int, encode: Encode, give: Give = nothing) -> None:
        """Have the push of a part made and sent. Any thread may call it.

        Where it carries a commit, `give` is called in the exchange's thread until the round is answered.
        """
        with self._changed:
            self._unsent += 1
        self._do(lambda now: self._push(part, encode, give))

    def commit(self, commit: say.Commit, give: Give = nothing) -> None:
        """Say what becomes of a round, whose pushes have all been submitted before; `give` as above."""
        self._do(lambda now: self._protocol.commit(commit, give))

    def fetch_state(self, seq: int) -> list[tuple[say.State, bytes]]:
        """Get the optimizer's state of all parts as it is after round `seq`, in the order of the parts."""
        asked = threading.Event()
        self._do(partial(self._ask_state, seq, asked))
        with self._changed:
            self._changed.wait_for(
                lambda: (asked.is_set() and self._protocol.has_state) or self._failure is not None
            )
        self._raise()
        states, self._protocol.states = self._protocol.states, {}
        return [states[part] for part in sorted(states)]

    def wait_sent(self) -> None:
        """Return when all submitted pushes have been read and encoded."""
        with self._changed:
            self._changed.wait_for(lambda: self._unsent == 0 or self._failure is not None)
        self._raise()

    def collect(self, seq: int, apply: Callable[[Answer], None]) -> None:
        """Wait for the answers to all pushes of round `seq` and apply each in the order of its part."""
        answers = self._protocol.answers
        while not answers.apply(seq, apply):
            self._raise()
            came = self._inbox.get()
            if isinstance(came, ShoestringError):
                raise came
            if isinstance(came, str):
                self._notice(came)
            else:
                answers.add(came)

    def poll_reports(self) -> Iterator[tuple[say.Snapped, bytes]]:
        """The reports on checkpoints that have come in."""
        while self._protocol.reports:
            yield self._protocol.reports.popleft()

    def wait_report(self, timeout_s: float) -> None:
        """Wait a little for such a report; raise if none can come any more."""
        with self._changed:
            if not self._changed.wait_for(lambda: bool(self._protocol.reports), timeout_s):
                self._raise()

    def expect_reports(self, seq: int) -> None:
        """See to it that all shards' reports on the checkpoint of a round come in."""
        self._do(lambda now: self._protocol.expect_reports(seq, now))

    def send_record(self, seq: int, record: bytes) -> None:
        """Report a file of a checkpoint to the first shard."""
        self._do(lambda now: self._protocol.record(seq, record, now))

    def close(self, moved: str = "") -> None:
        """Say goodbye to the shards and stop, or to go on with another policy. Does not raise."""
        if self._stop_at < math.inf:
            return
        self._stop_at = time.monotonic() + _LEAVE_S
        if self._thread.is_alive():
            self._do(lambda now: self._protocol.leave(now, moved))
            self._thread.join(_LEAVE_S + 1.0)
        for line in self._lines:
            line.socket.close(linger=1000)
        self._memory.close()

    def _do(self, task: Task) -> None:
        """Have something done in the exchange's thread."""
        self._tasks.append(task)
        os.eventfd_write(self._alarm, 1)

    def _raise(self) -> None:
        if self._failure is not None:
            raise self._failure

    # The rest runs in the exchange's own thread.

    def free_slot(self, part: int) -> tuple[int, Vector] | None:
        """A free slot of shared memory for a push of a part, if it has one. For `Encode`s."""
        shared = self._memory.parts.get(part)
        return None if shared is None else shared.free(self._protocol.slots(part))

    def _run(self) -> None:
        try:
            self._loop()
            self._fail(ShoestringError("this worker has left its run", hint="call `init` and `wrap` again"))
        except ShoestringError as error:
            self._fail(error)
        except Exception as error:  # whatever it is, the training thread must not wait for ever
            self._fail(ShoestringError(f"the exchange failed: {error!r}", hint="please report this"))

    def _fail(self, error: ShoestringError) -> None:
        with self._changed:
            self._failure = error
            self._changed.notify_all()
        self._inbox.put(error)

    def _loop(self) -> None:
        poller = zmq.Poller()
        for line in self._lines:
            poller.register(line.socket, zmq.POLLIN | zmq.POLLOUT)
        poller.register(self._alarm, zmq.POLLIN)
        next_tick = 0.0
        while not self._has_ended():
            for line in self._lines:
                self._open(line, poller)
            with suppress(BlockingIOError):
                os.eventfd_read(self._alarm)
            self._receive()
            while self._tasks:
                self._tasks.popleft()(time.monotonic())
                self._send_all()
                self._receive()  # answers to earlier parts come in while later ones are encoded
            now = time.monotonic()
            if now >= next_tick:
                next_tick = now + BEAT_S
                self._protocol.tick(now)
            self._send_all()
            self._pass_on()
            if not self._has_ended():
                poller.poll(max(0, math.ceil(1000 * (min(next_tick, self._stop_at) - time.monotonic()))))

    def _has_ended(self) -> bool:
        return self._protocol.has_left or time.monotonic() >= self._stop_at

    def _push(self, part: int, encode: Encode, give: Give) -> None:
        push, payload = encode()
        if push.slot >= 0:
            self.traffic.up += 4 * self._sizes[part]
        self.traffic.up_float += 4 * self._sizes[part]
        self._protocol.push(push, payload, time.monotonic(), give)
        with self._changed:
            self._unsent -= 1
            if self._unsent == 0:
                self._changed.notify_all()

    def _beat(self, line: _Line, size: int, echoed: threading.Event, now: float) -> None:
        self._echoes[now] = echoed
        self._send(line, say.Beat(now), memoryview(bytes(size)))

    def _ask_state(self, seq: int, asked: threading.Event, now: float) -> None:
        self._protocol.ask_state(seq, now)
        asked.set()

    def _open(self, line: _Line, poller: zmq.Poller) -> None:
        """Send what waits for a connection, once that is there."""
        if line.is_open or not line.socket.poll(0, zmq.POLLOUT):
            return
        line.is_open = True
        poller.modify(line.socket, zmq.POLLIN)
        if line.first is not None:
            self._write(line, line.first)

    def _send_all(self) -> None:
        outbox = self._protocol.outbox
        while outbox:
            shard, message, payload = outbox.popleft()
            self._send(self._lines[shard], message, payload)

    def _send(self, line: _Line, message: Message, payload: memoryview) -> None:
        encoded = frames.encode(message, payload)
        if line.is_open:
            self._write(line, encoded)
        else:
            line.first = encoded  # a `Hello`, or the same again: nothing else is said before a `Welcome`

    def _write(self, line: _Line, encoded: Frames) -> None:
        try:
            line.socket.send_multipart(encoded, zmq.NOBLOCK, copy=False)
        except zmq.Again:  # its queue is full: what waits for an answer is sent again later
            return
        self.traffic.up += len(encoded[0]) + len(encoded[1])

    def _receive(self) -> None:
        for line in self._lines:
            while True:
                try:
                    received = line.socket.recv_multipart(zmq.NOBLOCK, copy=False)
                except zmq.Again:
                    break
                self._take(line, [frame.buffer for frame in received])
        self._pass_on()

    def _take(self, line: _Line, buffers: list[memoryview]) -> None:
        try:
            message, payload = frames.decode(buffers)
        except WireError:  # damaged on the way: what it was is asked for again
            return
        self.traffic.down += sum(buffer.nbytes for buffer in buffers)
        now = time.monotonic()
        if isinstance(message, say.Beat):
            line.measure(payload.nbytes, now - message.at)
            echoed = self._echoes.pop(message.at, None)
            if echoed is not None:
                echoed.set()
        elif isinstance(message, say.Full) and message.slot >= 0:
            shared = self._memory.parts.get(message.part)
            if shared is None:
                raise WireError("an answer names memory that is not shared", hint="check versions")
            payload = shared.read(message.slot)
            self.traffic.down += payload.nbytes
        self._protocol.handle(line.index, message, payload, now)

    def _pass_on(self) -> None:
        """Give the training thread what has come in."""
        protocol = self._protocol
        while protocol.heard:
            answer = protocol.heard.popleft()
            if answer.message.seq:
                self.traffic.down_float += 4 * self._sizes[answer.part]
            self._inbox.put(answer)
        while protocol.notices:
            self._inbox.put(protocol.notices.popleft())
        if protocol.reports or protocol.states:
            with self._changed:
                self._changed.notify_all()
