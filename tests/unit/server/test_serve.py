"""A shard behind a real socket."""

import contextlib
import threading
import time

import msgspec
import numpy as np
import psutil
import pytest
import zmq

from shoestring.server.serve import Service
from shoestring.server.shard import Shard
from shoestring.wire import frames
from shoestring.wire import messages as say
from shoestring.wire.link import Listener, connect
from tests.unit.server.talk import PARTS, Talk, gradient, push_of, table

WAIT_MS = 30_000


class Served:
    """A service in a thread, and sockets to it."""

    def __init__(self, *, threads: int = 1, workers: int = 1, max_queued: int = 64) -> None:
        self.shard = Shard(0, 1, "run")
        self.workers = workers
        self.reports: list[tuple[str, dict]] = []
        self._threads, self._max_queued = threads, max_queued
        self._open = contextlib.ExitStack()

    def __enter__(self) -> "Served":
        self._context = self._open.enter_context(zmq.Context())
        self._listener = Listener(
            self._context,
            "tcp://127.0.0.1:0",
            keys=None,
            max_message_bytes=frames.PAYLOAD_LIMIT,
            max_queued=self._max_queued,
        )
        self._open.callback(self._listener.close)
        self.service = Service(
            self.shard,
            self._listener,
            threads=self._threads,
            report=lambda event, **fields: self.reports.append((event, fields)),
        )
        self.thread = threading.Thread(target=self.service.run, daemon=True)
        self.thread.start()
        self._open.callback(self.thread.join, 30)
        self._open.callback(self.service.stop)
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def dial(self, identity: bytes) -> zmq.SyncSocket:
        socket = connect(
            self._context,
            self._listener.address,
            keys=None,
            identity=identity,
            max_message_bytes=frames.PAYLOAD_LIMIT,
            max_queued=self._max_queued,
        )
        self._open.callback(socket.close, 0)
        return socket

    def join(self, worker: int) -> zmq.SyncSocket:
        socket = self.dial(b"%d.1" % worker)
        hello = say.Hello(
            protocol=say.PROTOCOL,
            run="run",
            worker=worker,
            workers=self.workers,
            life="1",
            shard=0,
            shards=1,
        )
        tell(socket, hello, msgspec.msgpack.encode(table()))
        assert isinstance(hear(socket)[0], say.Welcome)
        tell(socket, say.Enter(1))
        assert hear(socket)[0] == say.Entered(1, 1, True)
        return socket

    def fill(self, socket: zmq.SyncSocket) -> None:
        for part in PARTS:
            tell(socket, say.Init(part.index), bytes(4 * part.size))


def tell(socket: zmq.SyncSocket, message: say.Message, payload: frames.Buffer = b"") -> None:
    assert socket.poll(WAIT_MS, zmq.POLLOUT)
    socket.send_multipart(frames.encode(message, payload))


def hear(socket: zmq.SyncSocket) -> tuple[say.Message, bytes]:
    assert socket.poll(WAIT_MS), "no answer"
    message, payload = frames.decode(socket.recv_multipart())
    return message, bytes(payload)


def push(socket: zmq.SyncSocket, part: int, worker: int, seq: int, codec: str) -> None:
    tell(socket, *push_of(part, worker, seq, codec=codec))


@pytest.mark.parametrize("codec", ["float32", "dct"])
@pytest.mark.parametrize("threads", [1, 2])
def test_rounds_give_the_same_bits_as_without_sockets_and_threads(threads, codec):
    talk = Talk().begin()
    with Served(threads=threads, workers=2) as served:
        sockets = [served.join(worker) for worker in (0, 1)]
        served.fill(sockets[0])
        for seq in range(1, 6):
            talk.round(seq, codec=codec)
            for part in PARTS:
                for worker, socket in enumerate(sockets):
                    push(socket, part.index, worker, seq, codec)
            for socket in sockets:
                assert {hear(socket)[0].part for _ in PARTS} == {0, 1}
    assert [rounds.holding.params.tobytes() for rounds in served.shard.parts.values()] == talk.params()


def test_malformed_messages_are_counted_and_others_are_served_meanwhile():
    good = frames.encode(say.Beat(1.0), b"payload")
    bad = [
        [b""],
        [b"x"] * 2,
        [b"x"] * 3,
        [*good, b""],
        [good[0][:-1], good[1]],
        [good[0], good[1] + b"!"],
        [b"\0" * frames.HEADER_LIMIT + b"more", b""],
    ]
    with Served() as served:
        member, stranger = served.join(0), served.dial(b"stranger")
        for number, message in enumerate(bad):
            for socket in (stranger, member):
                assert socket.poll(WAIT_MS, zmq.POLLOUT)
                socket.send_multipart(message)
            tell(member, say.Beat(float(number)))
            assert hear(member)[0] == say.Beat(float(number))
        tell(stranger, say.Beat(0.0))
        assert isinstance(hear(stranger)[0], say.Refusal)
        assert served.service.bad_messages == 2 * len(bad)
        assert [event for event, _ in served.reports].count("bad_message") == 2 * len(bad)


def test_a_reader_that_does_not_read_costs_no_more_memory_than_its_queue():
    queued, part_bytes = 4, 4 * PARTS[0].size
    with Served(max_queued=queued) as served:
        member = served.join(0)
        served.fill(member)
        process, largest = psutil.Process(), 0
        before = process.memory_info().rss
        for seq in range(1, 401):
            values = gradient(0, 0, 1)
            message, _ = push_of(0, 0, seq, have=0)
            tell(member, message, values.view(np.uint8).data)
            deadline = time.monotonic() + 30
            while served.shard.parts[0].round < seq and time.monotonic() < deadline:
                served.thread.join(0.0005)
            assert served.shard.parts[0].round == seq
            largest = max(largest, process.memory_info().rss - before)
        assert served.service.dropped > 0
        assert 400 * part_bytes > 40 << 20
        assert largest < 24 << 20
        seen = []
        while 400 not in seen:  # the answer is still to be had: a worker asks until it has it
            tell(member, say.Ask(0, 400, 0))
            message, payload = hear(member)
            seen.append(message.seq)
            assert len(seen) < 400
        assert payload == served.shard.parts[0].holding.params.tobytes()


def test_work_that_fails_is_told_to_its_worker():
    with Served(workers=2) as served:
        sockets = [served.join(worker) for worker in (0, 1)]
        served.fill(sockets[0])
        push(sockets[0], 0, 0, 1, "float32")
        message, payload = push_of(0, 1, 1, codec="dct")
        tell(sockets[1], message, bytes(payload)[:-5])
        assert isinstance(hear(sockets[1])[0], say.Refusal)
        assert hear(sockets[0])[0] == say.Full(part=0, version=1, seq=1)


def test_it_ends_when_all_workers_have_left():
    with Served(workers=2) as served:
        served.service.stop()
        served.thread.join(30)
        service = Service(served.shard, served._listener)
        ended = threading.Thread(target=service.run, kwargs={"until_all_left": True}, daemon=True)
        ended.start()
        for worker in (0, 1):
            tell(served.join(worker), say.Leave())
        ended.join(30)
        assert not ended.is_alive()


def test_stop_is_prompt_also_with_work_under_way_and_may_be_called_again():
    with Served() as served:
        member = served.join(0)
        served.fill(member)
        push(member, 0, 0, 1, "dct")
        began = time.monotonic()
        served.service.stop()
        served.thread.join(30)
        assert not served.thread.is_alive()
        assert time.monotonic() - began < 10
        served.service.stop()
