"""A slow link between two hosts, emulated on loopback in user space, without root.

Processes on the *left* host reach listeners on the *right* one (and the other
way round) through a TCP relay. Each direction is one serial line, shared by all
connections that cross it: a chunk of b bytes keeps it busy for b * 8 / rate,
connections take turns chunk by chunk, and a chunk arrives `delay_s` after it
left. What a connection may have on its way is bounded; beyond that the relay
stops reading and the sender's own buffers fill, as behind a small router.

`Line` and `Direction` know neither sockets nor clocks: their times are given.
A thread that wakes late puts the next chunk where the one before it ended, so
late wake-ups delay bytes but do not lower the rate.

Not emulated: headers (the rate is of payload), loss, and the round trip of
opening or resetting a connection, which takes effect on both sides at once.
"""

import contextlib
import math
import os
import re
import selectors
import socket
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from selectors import EVENT_READ, EVENT_WRITE

from shoestring.errors import LinkError, UsageError

QUEUE_BYTES = 64 << 10  # what a connection may hold at the relay beyond what is in flight

_CHUNK_S = 2e-3  # a turn on the line: this long, but within these bounds
_CHUNK_BYTES = (1448, 16 << 10)
_READ_BYTES = 64 << 10
_SOCKET_BYTES = 32 << 10
_SEGMENT_BYTES = 1448
_ROUNDS = 16  # then the other direction gets its turn, however fast the sender
_UNLIMITED_MBIT_S = 2000.0  # for bounds on memory alone: about what the relay itself can carry


class Line:
    """When bytes leave a line that sends one chunk after another."""

    def __init__(self, rate_mbit_s: float | None) -> None:
        if rate_mbit_s is not None and not 1e-3 <= rate_mbit_s <= 1e5:
            raise UsageError(
                f"a rate of {rate_mbit_s} Mbit/s", hint="give 0.001 to 100000, or None: unlimited"
            )
        self.rate_mbit_s = rate_mbit_s
        self.free_at_s = -math.inf

    @property
    def chunk_bytes(self) -> int:
        """The most bytes of one turn."""
        least, most = _CHUNK_BYTES
        if self.rate_mbit_s is None:
            return most
        return min(max(int(self.rate_mbit_s * 1e6 / 8 * _CHUNK_S), least), most)

    def depart(self, now_s: float, size_bytes: int) -> float:
        """Take a chunk that is ready now; return when its last byte leaves."""
        start_s = max(now_s, self.free_at_s)
        duration_s = 0.0 if self.rate_mbit_s is None else size_bytes * 8 / (self.rate_mbit_s * 1e6)
        self.free_at_s = start_s + duration_s
        return self.free_at_s


class Lane:
    """One direction of one connection: bytes that wait for the line."""

    def __init__(self) -> None:
        self.waiting: deque[tuple[float, memoryview]] = deque()
        self.held_bytes = 0  # waiting, on the line, in flight, or not taken by the receiver yet

    def take(self, most_bytes: int) -> tuple[float, memoryview]:
        """Remove the next chunk; return when it was ready, and its bytes."""
        ready_s, data = self.waiting.popleft()
        if len(data) > most_bytes:
            self.waiting.appendleft((ready_s, data[most_bytes:]))
        return ready_s, data[:most_bytes]


class Direction:
    """One way across the link: lanes take turns on the line, chunks arrive `delay_s` later."""

    def __init__(self, rate_mbit_s: float | None, delay_s: float) -> None:
        self.line = Line(rate_mbit_s)
        self.delay_s = delay_s
        self.crossed_bytes = 0
        self._turns: deque[Lane] = deque()  # lanes with bytes waiting, each once
        self._flight: deque[tuple[float, Lane, memoryview]] = deque()

    @property
    def most_bytes(self) -> int:
        """What one lane may hold: a small queue, and what is in flight at the full rate."""
        rate_mbit_s = self.line.rate_mbit_s or _UNLIMITED_MBIT_S
        return QUEUE_BYTES + int(rate_mbit_s * 1e6 / 8 * self.delay_s)

    def room(self, lane: Lane) -> int:
        """How many bytes `lane` may be offered: none, or enough for a whole turn."""
        room = self.most_bytes - lane.held_bytes
        return room if room >= self.line.chunk_bytes else 0

    def offer(self, lane: Lane, data: bytes, ready_s: float) -> None:
        """Queue bytes that were ready to cross at `ready_s`."""
        if not lane.waiting:
            self._turns.append(lane)
        lane.waiting.append((ready_s, memoryview(data)))
        lane.held_bytes += len(data)

    def advance(self, now_s: float) -> list[tuple[float, Lane, memoryview]]:
        """Let time pass until `now_s`; return what has arrived: when, on which lane, which bytes."""
        while self._turns and self.line.free_at_s <= now_s:
            lane = self._turns.popleft()
            ready_s, chunk = lane.take(self.line.chunk_bytes)
            self._flight.append((self.line.depart(ready_s, len(chunk)) + self.delay_s, lane, chunk))
            if lane.waiting:
                self._turns.append(lane)
        arrived = []
        while self._flight and self._flight[0][0] <= now_s:
            arrived.append(self._flight.popleft())
            self.crossed_bytes += len(arrived[-1][2])
        return arrived

    def next_s(self) -> float:
        """When `advance` next has something to do; infinity if never."""
        starts_s = self.line.free_at_s if self._turns else math.inf
        return min(starts_s, self._flight[0][0]) if self._flight else starts_s

    def drop(self, lane: Lane) -> None:
        """Forget what `lane` still waits to send, and what of it is in flight."""
        if lane.waiting:
            self._turns.remove(lane)
            lane.waiting.clear()
        self._flight = deque(entry for entry in self._flight if entry[1] is not lane)


class _Pipe(Lane):
    """A lane with its sockets: read from `source`, cross `way`, write to `sink`."""

    def __init__(self, source: socket.socket, sink: socket.socket, way: Direction) -> None:
        super().__init__()
        self.source, self.sink, self.way = source, sink, way
        self.outbox: deque[memoryview] = deque()
        self.is_reading = True  # False while there is no room, and after the end
        self.has_ended = False  # the source sends no more
        self.is_closed = False  # and the sink was told
        self.back: _Pipe = self  # the other direction of the connection


class SlowLink:
    """A full-duplex link between a left and a right host.

    `rate_mbit_s` (None: unlimited) holds each way, shared by all connections in
    that direction; `delay_s` is one way. Close it, or use it as a context.
    """

    def __init__(self, rate_mbit_s: float | None, delay_s: float = 0.0) -> None:
        if not 0 <= delay_s <= 60:
            raise UsageError(f"a delay of {delay_s} s", hint="give `delay_s` as 0 to 60 seconds")
        self._to_right = Direction(rate_mbit_s, delay_s)
        self._to_left = Direction(rate_mbit_s, delay_s)
        # Not the default one: that rounds up to milliseconds, in which a fast line moves many chunks.
        self._selector = selectors.SelectSelector()
        self._pipes: set[_Pipe] = set()
        self._listeners: list[socket.socket] = []
        self._calls: deque[Callable[[], object]] = deque()
        self._alarm = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._alarm)  # nobody can write to it any more
        self._selector.register(self._alarm, EVENT_READ, self._answer)
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="slow link", daemon=True)
        self._thread.start()

    def toward_right(self, address: str) -> str:
        """Return the address by which the left reaches the listener at `address` on the right."""
        return self._listen(address, self._to_right, self._to_left)

    def toward_left(self, address: str) -> str:
        """Return the address by which the right reaches the listener at `address` on the left."""
        return self._listen(address, self._to_left, self._to_right)

    @property
    def bytes_to_right(self) -> int:
        """Payload bytes that have crossed from left to right."""
        return self._to_right.crossed_bytes

    @property
    def bytes_to_left(self) -> int:
        """Payload bytes that have crossed from right to left."""
        return self._to_left.crossed_bytes

    def close(self) -> None:
        """Close all connections and listeners; what has not arrived is lost."""
        self._is_closing = True
        self._call(lambda: None)
        self._thread.join()

    def __enter__(self) -> "SlowLink":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _listen(self, address: str, forth: Direction, back: Direction) -> str:
        target = _parse(address)
        if self._is_closing:
            raise LinkError("the link is closed", hint="open another `SlowLink`")
        listener = _prepare(socket.socket())  # before `listen`: accepted sockets inherit it
        listener.bind(("127.0.0.1", 0))
        listener.listen(128)

        def accept(_: int) -> None:
            with contextlib.suppress(OSError):  # gone again, or out of descriptors: the next one may fit
                self._connect(listener.accept()[0], target, forth, back)

        self._listeners.append(listener)
        self._call(partial(self._selector.register, listener, EVENT_READ, accept))
        return f"tcp://127.0.0.1:{listener.getsockname()[1]}"

    def _call(self, call: Callable[[], object]) -> None:
        """Have the relay's thread, which alone touches sockets and lines, do something."""
        self._calls.append(call)
        os.eventfd_write(self._alarm, 1)

    def _run(self) -> None:
        try:
            while not self._is_closing:
                self._move()
                for key, events in self._wait():
                    key.data(events)
        finally:
            for pipe in list(self._pipes):
                self._forget(pipe, with_reset=True)
            for listener in self._listeners:
                listener.close()
            self._selector.close()

    def _wait(self) -> list[tuple[selectors.SelectorKey, int]]:
        until_s = min(self._to_right.next_s(), self._to_left.next_s())
        if until_s == math.inf:
            return self._selector.select()
        return self._selector.select(max(until_s - time.monotonic(), 0.0))

    def _answer(self, _: int) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._alarm)
        while self._calls:
            self._calls.popleft()()

    def _move(self) -> None:
        """Bring both directions up to now; again, when that made room for bytes that are due too."""
        now_s = time.monotonic()
        for way in (self._to_right, self._to_left):
            for _ in range(_ROUNDS):
                if way.next_s() > now_s:
                    break
                for arrived_s, lane, chunk in way.advance(now_s):
                    if isinstance(lane, _Pipe) and lane in self._pipes:
                        lane.outbox.append(chunk)
                        self._write(lane, arrived_s)

    def _connect(
        self, client: socket.socket, target: tuple[str, int], forth: Direction, back: Direction
    ) -> None:
        server = _prepare(socket.socket())
        _prepare(client)
        pipe, pipe.back = _Pipe(client, server, forth), _Pipe(server, client, back)
        pipe.back.back = pipe
        self._pipes |= {pipe, pipe.back}
        # Not waited for: until it is through, reading and writing would block; if it fails, both fail.
        server.connect_ex(target)
        self._watch(pipe)

    def _watch(self, pipe: _Pipe) -> None:
        """Ask the selector for just what the two sockets of a connection can do next."""
        for near in (pipe, pipe.back):
            wanted = EVENT_READ if near.is_reading else 0
            wanted |= EVENT_WRITE if near.back.outbox else 0
            key = self._selector.get_map().get(near.source)
            if key is None and wanted:
                self._selector.register(near.source, wanted, partial(self._serve, near))
            elif key is not None and not wanted:
                self._selector.unregister(near.source)
            elif key is not None and key.events != wanted:
                self._selector.modify(near.source, wanted, key.data)

    def _serve(self, pipe: _Pipe, events: int) -> None:
        now_s = time.monotonic()
        if events & EVENT_WRITE and pipe in self._pipes:
            self._write(pipe.back, now_s)
        if events & EVENT_READ and pipe in self._pipes:
            self._read(pipe, now_s)

    def _read(self, pipe: _Pipe, ready_s: float) -> None:
        """Read what there is room for; after a pause, `ready_s` is when there was room again."""
        with self._or_abort(pipe):
            while not pipe.has_ended and (room := pipe.way.room(pipe)):
                data = pipe.source.recv(min(room, _READ_BYTES))
                if data:
                    pipe.way.offer(pipe, data, ready_s)
                else:
                    pipe.has_ended = True
        pipe.is_reading = not pipe.has_ended and pipe.way.room(pipe) > 0
        self._finish(pipe)

    def _write(self, pipe: _Pipe, now_s: float) -> None:
        """Hand over what has arrived; that makes room to read more, since `now_s`."""
        with self._or_abort(pipe):
            while pipe.outbox:
                written = pipe.sink.send(pipe.outbox[0])
                pipe.held_bytes -= written
                rest = pipe.outbox.popleft()[written:]
                if rest:
                    pipe.outbox.appendleft(rest)
        if pipe.is_reading:
            self._finish(pipe)
        elif pipe in self._pipes:
            self._read(pipe, now_s)

    def _finish(self, pipe: _Pipe) -> None:
        """Pass on the end of what one side sends, once all of it arrived; close after both ends."""
        if pipe.has_ended and not pipe.held_bytes and not pipe.is_closed:
            pipe.is_closed = True
            with self._or_abort(pipe):
                pipe.sink.shutdown(socket.SHUT_WR)
        if pipe.is_closed and pipe.back.is_closed:
            self._forget(pipe)
        elif pipe in self._pipes:
            self._watch(pipe)

    @contextlib.contextmanager
    def _or_abort(self, pipe: _Pipe) -> Iterator[None]:
        """End a connection at once, on both sides with a reset, when one of its sockets fails."""
        try:
            yield
        except BlockingIOError:
            pass
        except OSError:
            self._forget(pipe, with_reset=True)

    def _forget(self, pipe: _Pipe, *, with_reset: bool = False) -> None:
        if pipe not in self._pipes:
            return
        self._pipes -= {pipe, pipe.back}
        for near in (pipe, pipe.back):
            if near.source in self._selector.get_map():
                self._selector.unregister(near.source)
            if with_reset:
                near.source.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            near.way.drop(near)
            near.source.close()


def _prepare(end: socket.socket) -> socket.socket:
    """Keep the kernel from hiding the link: no waiting to fill segments, small buffers.

    Segments as on Ethernet, because loopback's own are larger than the buffers,
    and a window that never fits a segment waits for timers.
    """
    end.setblocking(False)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, _SEGMENT_BYTES)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BYTES)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
    return end


def _parse(address: str) -> tuple[str, int]:
    parts = re.fullmatch(r"tcp://([0-9]{1,3}(?:\.[0-9]{1,3}){3}):([0-9]{1,5})", address)
    if parts is None or not 0 < int(parts[2]) < 1 << 16:
        raise UsageError(
            f"`{address}` is no address to relay to", hint="write it like `tcp://127.0.0.1:5000`"
        )
    return parts[1], int(parts[2])
