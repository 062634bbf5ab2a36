"""Talk to the shards from a thread of its own, so that training need not wait.

The training thread submits pushes and collects answers; this thread encodes, sends,
receives, and keeps the connection alive. Values are read and written only where the
training thread allows it: a push is read when it is submitted or soon after, before
`wait_sent` returns; answers change parameters only inside `collect`.

A push without an answer is asked about; a shard that does not have it gets it again,
under the same name. A shard that is silent for `timeout_s` is an error.
"""

import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import zmq

from shoestring.codec.base import Vector
from shoestring.errors import LinkError, ShoestringError, StaleWorkerError, WireError
from shoestring.wire import frames
from shoestring.wire import messages as say
from shoestring.wire.messages import Message
from shoestring.wire.shared import SLOTS
from shoestring.wire.waker import Waker
from shoestring.worker.join import SharedPair

_BEAT_S = 1.0
_ASK_S = 5.0
_PROBE_BYTES = 1 << 17
_SLOWEST_BYTES_S = 125_000 / 2  # 1 Mbit/s, there and back

Frames = tuple[bytes, frames.Buffer]
Encode = Callable[[], tuple[Message, frames.Buffer]]


@dataclass
class Traffic:
    """Bytes on the wire, and what they would be as float32."""

    up: int = 0
    down: int = 0
    up_float: int = 0
    down_float: int = 0


@dataclass(frozen=True)
class Answer:
    """A reply to one push of one part."""

    part: int
    message: say.Full | say.Delta
    payload: memoryview

    @property
    def is_last(self) -> bool:
        return isinstance(self.message, say.Full) or self.message.last


@dataclass
class _Sent:
    """A push that waits for its answer."""

    frames: Frames
    asked_at: float
    slot: int = -1  # of shared memory, taken until the answer is here
    pause_s: float = _ASK_S


@dataclass
class _Order:
    """A push to be made: `encode` is called in the exchange's thread."""

    part: int
    seq: int
    encode: "Encode"


@dataclass
class _Probe:
    """A beat to be sent to one shard, with so many bytes."""

    shard: int
    size: int
    is_echoed: threading.Event = field(default_factory=threading.Event)


@dataclass
class _Line:
    """The connection to one shard."""

    index: int
    address: str
    socket: "zmq.Socket[bytes]"
    heard_at: float = field(default_factory=time.monotonic)
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


class Exchange:
    """One worker's connections to all shards."""

    def __init__(
        self,
        sockets: list[tuple[str, "zmq.Socket[bytes]"]],
        homes: tuple[int, ...],
        sizes: tuple[int, ...],
        *,
        shared: Sequence[SharedPair | None] = (),
        clip_norm: float = 0.0,
        timeout_s: float = 60.0,
    ) -> None:
        self.traffic = Traffic()
        self.bad_messages = 0
        self._lines = [_Line(index, address, socket) for index, (address, socket) in enumerate(sockets)]
        self._homes = homes
        self._shared = list(shared) or [None] * len(sockets)
        self._sizes = sizes
        self._clip_norm = clip_norm
        self._timeout_s = timeout_s
        self._orders: deque[_Order | _Probe | Message] = deque()
        self._probes: dict[float, _Probe] = {}  # under way, by the time they were sent
        self._unsent = 0
        self._changed = threading.Condition()
        self._answers: queue.SimpleQueue[Answer | ShoestringError] = queue.SimpleQueue()
        self._early: dict[int, list[Answer]] = {}
        self._sent: dict[tuple[int, int], _Sent] = {}
        self._have = [0] * len(homes)
        self._accepted = [0] * len(homes)  # the version of each part up to which answers have come in
        self._norms: dict[int, dict[int, float]] = {}
        self._snapped: queue.SimpleQueue[tuple[say.Snapped, bytes]] = queue.SimpleQueue()
        self._waker = Waker()
        self._stopping = False
        self._failure: ShoestringError | None = None
        self._thread = threading.Thread(target=self._run, name="exchange", daemon=True)

    def rates(self) -> list[float]:
        """The rate of the link to each shard as last measured, in bytes a second."""
        return [line.rate for line in self._lines]

    def probe(self) -> None:
        """Measure the links, one after the other; returns when all shards have answered."""
        for line in self._lines:
            for size in (0, 0, _PROBE_BYTES, _PROBE_BYTES):
                probe = _Probe(line.index, size)
                self._orders.append(probe)
                self._waker.wake()
                while not probe.is_echoed.wait(0.5):
                    self._raise()

    def ask_rates(self) -> None:
        """Measure the links again, without waiting for it."""
        self._orders.extend(_Probe(line.index, _PROBE_BYTES) for line in self._lines)
        self._waker.wake()

    @property
    def rtt_s(self) -> float:
        """The longest time to a shard and back that was seen of late."""
        return max(line.rtt_s for line in self._lines)

    def start(self, versions: list[int]) -> None:
        """Begin, holding these versions of the parts."""
        self._have = list(versions)
        self._accepted = list(versions)
        for line in self._lines:
            line.heard_at = time.monotonic()
        self._thread.start()

    def have(self, part: int) -> int:
        """The version of a part this worker holds."""
        return self._have[part]

    def submit(self, part: int, seq: int, encode: Encode) -> None:
        """Have a push made and sent. Any thread may call it."""
        with self._changed:
            self._unsent += 1
        self._orders.append(_Order(part, seq, encode))
        self._waker.wake()

    def tell(self, message: Message) -> None:
        """Send a message without payload to all shards."""
        self._orders.append(message)
        self._waker.wake()

    def wait_sent(self) -> None:
        """Return when all submitted pushes have been read and encoded."""
        with self._changed:
            self._changed.wait_for(lambda: self._unsent == 0 or self._failure is not None)
        self._raise()

    def collect(self, seq: int, apply: Callable[[Answer], None]) -> None:
        """Wait for the answers to all pushes of round `seq` and apply each in the order of its part."""
        missing = set(range(len(self._homes)))
        waiting = deque(self._early.pop(seq, []))
        while missing:
            answer = waiting.popleft() if waiting else self._next_answer()
            if answer.message.seq != seq:
                self._early.setdefault(answer.message.seq, []).append(answer)
                continue
            part, version = answer.part, answer.message.version
            if version > self._have[part]:
                if isinstance(answer.message, say.Delta) and version != self._have[part] + 1:
                    raise WireError(
                        f"part {part} came at version {version}, this worker holds {self._have[part]}",
                        hint="please report this with the event log",
                    )
                apply(answer)
                self._have[part] = version
            if answer.is_last:
                missing.discard(part)

    def poll_reports(self) -> Iterator[tuple[say.Snapped, bytes]]:
        """The reports on checkpoints that have come in."""
        while not self._snapped.empty():
            yield self._snapped.get()

    def wait_report(self, timeout_s: float) -> None:
        """Wait a little for such a report."""
        with self._changed:
            self._changed.wait_for(lambda: not self._snapped.empty(), timeout_s)

    def expect_reports(self, seq: int) -> None:
        """See to it that all shards' reports on the checkpoint of a round come in."""

    def send_record(self, seq: int, record: bytes) -> None:
        """Report a file of a checkpoint to the first shard."""
        self._orders.append(_Order(-1, seq, lambda: (say.Saved(seq), record)))
        self._waker.wake()

    def close(self) -> None:
        """Say goodbye to the shards and stop. Does not raise."""
        if self._stopping:
            return
        self.tell(say.Leave())
        self._stopping = True
        self._waker.wake()
        if self._thread.is_alive():
            self._thread.join(5.0)
        for line in self._lines:
            line.socket.close(linger=1000)
        for pair in self._shared:
            if pair is not None:
                pair.own.close()

    def _next_answer(self) -> Answer:
        self._raise()
        answer = self._answers.get()
        if isinstance(answer, ShoestringError):
            raise answer
        return answer

    def _raise(self) -> None:
        if self._failure is not None:
            raise self._failure

    # The rest runs in the exchange's own thread.

    def room(self, part: int) -> tuple[int, Vector] | None:
        """A free slot of shared memory for a push of a part, if it has one. For `Encode`s."""
        pair = self._shared[self._homes[part]]
        if pair is None:
            return None
        taken = {sent.slot for (index, _), sent in self._sent.items() if index == part}
        for slot in range(SLOTS):
            if slot not in taken and pair.own.reserve(slot):
                return slot, pair.own.slot(pair.places[part], slot)
        return None

    def _continues(self, message: say.Full | say.Delta) -> bool:
        """Say whether an answer goes on from what has come in for its part, and remember it if so."""
        before = self._accepted[message.part]
        if isinstance(message, say.Delta) and message.version > before + 1:
            return False
        self._accepted[message.part] = max(before, message.version)
        return True

    def _shared_values(self, full: say.Full) -> memoryview:
        pair = self._shared[self._homes[full.part]]
        if pair is None or full.slot >= SLOTS:
            raise WireError("an answer names shared memory that is not there", hint="check versions")
        return pair.theirs.slot(pair.places[full.part], full.slot).view(np.uint8).data

    def _run(self) -> None:
        try:
            self._loop()
        except ShoestringError as error:
            self._fail(error)
        except Exception as error:  # whatever it is, the training thread must not wait for ever
            self._fail(ShoestringError(f"the exchange failed: {error!r}", hint="please report this"))

    def _fail(self, error: ShoestringError) -> None:
        with self._changed:
            self._failure = error
            self._changed.notify_all()
        self._answers.put(error)

    def _loop(self) -> None:
        poller = zmq.Poller()
        for line in self._lines:
            poller.register(line.socket, zmq.POLLIN)
        poller.register(self._waker.fileno(), zmq.POLLIN)
        next_beat = 0.0
        while True:
            poller.poll(max(0, int(1000 * (next_beat - time.monotonic()))))
            self._waker.clear()
            for line in self._lines:
                self._receive(line)
            while self._orders:
                self._carry_out(self._orders.popleft())
                for line in self._lines:  # answers to earlier parts come in while later ones are encoded
                    self._receive(line)
            now = time.monotonic()
            if now >= next_beat:
                next_beat = now + _BEAT_S
                self._beat(now)
            if self._stopping and not self._orders:
                return

    def _carry_out(self, order: _Order | _Probe | Message) -> None:
        if isinstance(order, _Probe):
            now = time.monotonic()
            self._probes[now] = order
            self._send(self._lines[order.shard], frames.encode(say.Beat(now), bytes(order.size)))
            return
        if isinstance(order, Message):
            for line in self._lines:
                self._send(line, frames.encode(order))
            return
        push, payload = order.encode()
        encoded = frames.encode(push, payload)
        if order.part < 0:
            self._send(self._lines[0], encoded)
            return
        slot = push.slot if isinstance(push, say.Push) else -1
        self._sent[order.part, order.seq] = _Sent(encoded, time.monotonic(), slot)
        if slot >= 0:
            self.traffic.up += 4 * self._sizes[order.part]
        self.traffic.up_float += 4 * self._sizes[order.part]
        self._send(self._lines[self._homes[order.part]], encoded)
        with self._changed:
            self._unsent -= 1
            if self._unsent == 0:
                self._changed.notify_all()

    def _send(self, line: _Line, encoded: Frames) -> None:
        try:
            line.socket.send_multipart(encoded, zmq.NOBLOCK, copy=False)
        except zmq.Again:  # its queue is full: the push is asked about later, and sent then
            return
        self.traffic.up += len(encoded[0]) + len(encoded[1])

    def _receive(self, line: _Line) -> None:
        while True:
            try:
                received = line.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            buffers = [frame.buffer for frame in received]
            try:
                message, payload = frames.decode(buffers)
            except WireError:  # damaged on the way: what it was is asked for again
                self.bad_messages += 1
                continue
            line.heard_at = time.monotonic()
            self.traffic.down += sum(buffer.nbytes for buffer in buffers)
            self._take(line, message, payload)

    def _take(self, line: _Line, message: Message, payload: memoryview) -> None:
        match message:
            case say.Full() | say.Delta():
                if isinstance(message, say.Full) and message.slot >= 0:
                    payload = self._shared_values(message)
                    self.traffic.down += payload.nbytes
                answer = Answer(message.part, message, payload)
                known = self._sent.get((message.part, message.seq))
                if known is None or not self._continues(message):
                    return  # a second answer to one push, or one before it was lost: it is asked for again
                if answer.is_last:
                    del self._sent[message.part, message.seq]
                self.traffic.down_float += 4 * self._sizes[message.part]
                if message.part not in self._norms.get(message.seq, ()):  # it was lost on its way
                    self._add_norm(message.seq, message.part, message.squares)
                self._answers.put(answer)
            case say.Norm():
                self._add_norm(message.seq, message.part, message.squares)
            case say.Missing():
                known = self._sent.get((message.part, message.seq))
                if known is not None:
                    self._send(line, known.frames)
            case say.Beat():
                elapsed_s = time.monotonic() - message.at
                if payload.nbytes:
                    line.rates.append(2 * payload.nbytes / max(elapsed_s - line.rtt_s, 1e-4))
                else:
                    line.rtts_s.append(elapsed_s)
                probe = self._probes.pop(message.at, None)
                if probe is not None:
                    probe.is_echoed.set()
            case say.Welcome() | say.Entered():
                pass  # late
            case say.Snapped():
                self._snapped.put((message, bytes(payload)))
                with self._changed:
                    self._changed.notify_all()
            case say.Refusal():
                kind = StaleWorkerError if message.stale else ShoestringError
                raise kind(f"shard {line.index} refused: {message.message}", hint=message.hint)
            case _:
                raise WireError(f"a worker does not take `{type(message).__name__}`", hint="check versions")

    def _add_norm(self, seq: int, part: int, squares: float) -> None:
        """Note a part's norm; when all are there, tell the shards how to scale."""
        if not self._clip_norm:
            return
        norms = self._norms.setdefault(seq, {})
        is_repeat = part in norms  # the shard asks again: it has not heard the scale
        norms.setdefault(part, squares)
        if len(norms) < len(self._homes):
            return
        norm = math.sqrt(sum(norms[index] for index in range(len(norms))))
        scale = say.Scale(seq, min(1.0, self._clip_norm / (norm + 1e-6)))
        if is_repeat:
            self._send(self._lines[self._homes[part]], frames.encode(scale))
        else:
            self.tell(scale)
        self._norms = {key: value for key, value in self._norms.items() if key >= seq - 4}

    def _beat(self, now: float) -> None:
        for line in self._lines:
            # On a slow link a beat waits behind the pushes before it, and its echo behind their answers.
            queued = sum(
                len(sent.frames[1])
                for (part, _), sent in self._sent.items()
                if self._homes[part] == line.index
            )
            if now - line.heard_at > self._timeout_s + queued / _SLOWEST_BYTES_S:
                raise LinkError(
                    f"shard {line.index} at `{line.address}` has not answered for {self._timeout_s:g} s",
                    hint="check that its process runs and that the network lets this host reach it",
                )
            self._send(line, frames.encode(say.Beat(now)))
        for (part, seq), sent in self._sent.items():
            if now - sent.asked_at > sent.pause_s:
                sent.asked_at, sent.pause_s = now, min(2 * sent.pause_s, 60.0)
                self._send(
                    self._lines[self._homes[part]], frames.encode(say.Ask(part, seq, self._have[part]))
                )
