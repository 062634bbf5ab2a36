"""What a message costs in a large run: measured with made-up workers and idle sockets.

A shard looks at all its workers for every push, and a worker at all its connections for
every message. With 16 workers that is lost in the rest; with thousands it is not. On the
other hand, a shard that always finds messages waiting need not be woken for each.
"""

import threading
import time

import zmq

from benchmarks.scale.costs import Crowd
from benchmarks.scale.peer import thread_seconds
from benchmarks.wire.load import RUN, SGD, Load
from shoestring.bench.link.peers import PATIENCE_S
from shoestring.errors import ShoestringError
from shoestring.server.serve import QUEUED, Service, listen
from shoestring.server.shard import Shard
from shoestring.wire import frames
from shoestring.wire import messages as say
from shoestring.wire.link import connect

_VALUES = 1024  # one part, so small that only the message counts
_COUNTS = (64, 1024)
_BATCH = 256  # messages that a shard takes before it looks for work
_ROUNDS = 3
_SOCKETS = 128
_LOOKS = 5
_BEATS = 2000  # fewer than a socket holds
_SETTLE_S = 0.2


def measure() -> Crowd:
    """Measure both sides; takes a few seconds."""
    few, many = (_push_s(count) for count in _COUNTS)
    look_s, poll_s = _look_s()
    member_s = max(0.0, (many - few) / (_COUNTS[1] - _COUNTS[0]))
    push_s = max(0.0, few - member_s * _COUNTS[0])
    return Crowd(member_s, look_s, poll_s, push_s, _message_s())


def _push_s(workers: int) -> float:
    """The seconds that a shard's protocol takes for one push, with so many workers."""
    load, shard = Load(_VALUES, SGD, "float32", workers), Shard(0, 1, RUN)
    for worker, message, payload in load.entry():
        shard.handle(b"%d" % worker, message, payload, 0.0)
    shard.outbox.clear()
    best = float("inf")
    for seq in range(1, _ROUNDS + 1):
        pushes = list(load.pushes(seq))
        start = time.thread_time()
        for place, (worker, message, payload) in enumerate(pushes, 1):
            shard.handle(b"%d" % worker, message, payload, 0.0)
            if place % _BATCH == 0 and place < workers:
                shard.tick(0.0)
                shard.next_work()
        best = min(best, time.thread_time() - start)
        while (work := shard.next_work()) is not None:
            work.run()
            shard.finish(work)
        shard.outbox.clear()
    return best / workers


def _look_s() -> tuple[float, float]:
    """The seconds that a worker takes to look at one idle connection, and to wait for it beside others."""
    with zmq.Context() as context:
        sockets = [context.socket(zmq.DEALER) for _ in range(_SOCKETS)]
        poller = zmq.Poller()
        for socket in sockets:
            poller.register(socket, zmq.POLLIN)
        look_s = poll_s = float("inf")
        for _ in range(_LOOKS):
            start = time.thread_time()
            for socket in sockets:
                try:
                    socket.recv_multipart(zmq.NOBLOCK, copy=False)
                except zmq.Again:
                    continue
            looked = time.thread_time()
            poller.poll(0)
            look_s, poll_s = min(look_s, looked - start), min(poll_s, time.thread_time() - looked)
        for socket in sockets:
            socket.close(linger=0)
    return look_s / _SOCKETS, poll_s / _SOCKETS


def _message_s() -> float:
    """The seconds that a shard's service thread takes for one of many messages that wait, in or out."""
    entry = list(Load(_VALUES, SGD, "float32", 1).entry())
    with zmq.Context() as context:
        listener = listen(context, "tcp://127.0.0.1:0")
        service = Service(Shard(0, 1, RUN), listener)
        thread = threading.Thread(target=service.run, name="flooded")
        limit = frames.PAYLOAD_LIMIT
        worker = connect(
            context, listener.address, keys=None, identity=b"0", max_message_bytes=limit, max_queued=QUEUED
        )
        try:
            for _, message, payload in entry:
                worker.send_multipart(frames.encode(message, payload))
            for number in range(_BEATS):
                worker.send_multipart(frames.encode(say.Beat(float(number))))
            time.sleep(_SETTLE_S)  # until all wait on the other side: ZeroMQ does not tell how many do
            thread.start()
            for _ in range(2 + _BEATS):  # welcome, entered, and an echo of each
                if not worker.poll(int(1e3 * PATIENCE_S)):
                    raise ShoestringError("a shard does not answer", hint="please report this")
                worker.recv_multipart()
            return thread_seconds()["flooded"] / (2 * _BEATS)
        finally:
            service.stop()
            if thread.ident is not None:
                thread.join()
            worker.close(linger=0)
            listener.close()
