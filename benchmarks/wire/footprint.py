"""How much memory a shard and a worker take, as real processes, against what they may take.

A shard: 1.25 times what it holds (parameters, optimizer state, feedback) and 64 MiB,
however many workers there are, beside the bytes they push in one round. A worker: 1.25
times the model and 32 MiB more than the same steps with torch's own optimizer. Both count
from when the process has loaded its code.
"""

import contextlib
from dataclasses import dataclass
from typing import Any

import psutil
import zmq

from benchmarks.wire.load import RUN, Load
from shoestring.bench.link.hosts import Hosts
from shoestring.bench.link.peers import PATIENCE_S, Peer, started
from shoestring.codec.registry import LOSSLESS, make
from shoestring.errors import ShoestringError
from shoestring.model.rules import Rule
from shoestring.wire import frames
from shoestring.wire import messages as say
from shoestring.wire.link import connect

ROUNDS = 4
_FACTOR = 1.25
_SHARD_SPARE, _WORKER_SPARE = 64 << 20, 32 << 20
_QUEUED = 100_000
_HERE = Hosts()


@dataclass(frozen=True)
class MemoryRow:
    """What one process took after some rounds, and at most meanwhile."""

    process: str  # `shard` or `worker`
    codec: str
    rule: str
    workers: int
    size_mb: float
    held_bytes: int  # what the limit is made of
    bytes: int
    peak_bytes: int
    limit_bytes: int
    holds: bool  # `bytes` are within the limit


def measure_shard(values: int, codec: str, rule: Rule, workers: int) -> MemoryRow:
    """Run a shard under the load of some workers."""
    load = Load(values, rule, codec, workers)
    vectors = 1 + len(rule.state_names) + (load.codec.name != LOSSLESS)
    with started(_HERE, 0, "the shard", _shard(codec)) as peer, zmq.Context() as context:
        address = peer.hear()["address"]
        before, _ = _memory(peer)
        sockets: list[zmq.SyncSocket] = []
        try:
            for worker in range(workers):
                identity = b"%d" % worker
                limit = frames.PAYLOAD_LIMIT
                sockets.append(
                    connect(
                        context,
                        address,
                        keys=None,
                        identity=identity,
                        max_message_bytes=limit,
                        max_queued=_QUEUED,
                    )
                )
            for worker, message, payload in load.entry():
                sockets[worker].send_multipart(frames.encode(message, payload), copy=False)
            for socket in sockets:
                _hear(socket, say.Welcome)
                _hear(socket, say.Entered)
            for seq in range(1, ROUNDS + 1):
                for worker, message, payload in load.pushes(seq):
                    sockets[worker].send_multipart(frames.encode(message, payload), copy=False)
                for socket in sockets:
                    for _ in load.parts:
                        _hear(socket, say.Full | say.Delta)
            after, peak = _memory(peer)
        finally:
            for socket in sockets:
                socket.close(linger=0)
    held = 4 * values * vectors
    most = int(_FACTOR * held) + _SHARD_SPARE + load.round_bytes
    return _row("shard", codec, rule.kind, workers, values, held, after - before, peak - before, most)


def measure_worker(values: int, codec: str) -> MemoryRow:
    """Run the same steps with a shard and without."""
    told = {
        "be": "worker",
        "worker": 0,
        "workers": 1,
        "values": values,
        "store": "",
        "card": "",
        "codecs": [codec],
    }
    with started(_HERE, 0, "the worker", told, "benchmarks.wire.peer") as plain:
        plain.hear()
        before, _ = _memory(plain)
        plain.ask(do="plain", times=ROUNDS)
        after, peak = _memory(plain)
        alone, alone_peak = after - before, peak - before
    with contextlib.ExitStack() as stack:
        shard = stack.enter_context(started(_HERE, 0, "the shard", _shard(codec)))
        address = shard.hear()["address"]
        worker = stack.enter_context(started(_HERE, 0, "the worker", told))
        worker.hear()
        before, _ = _memory(worker)
        worker.ask(do="join", run=RUN, codec=codec, shards=[address], keys=None)
        worker.ask(do="rounds", codec=codec, times=ROUNDS)
        after, peak = _memory(worker)
        worker.ask(do="leave", codec=codec)
    held = 4 * values
    most = int(_FACTOR * held) + _WORKER_SPARE
    beyond, beyond_peak = after - before - alone, peak - before - alone_peak
    return _row("worker", codec, "sgd", 1, values, held, beyond, beyond_peak, most)


def _row(
    process: str,
    codec: str,
    rule: str,
    workers: int,
    values: int,
    held: int,
    taken: int,
    peak: int,
    most: int,
) -> MemoryRow:
    spec = make(codec).spec
    return MemoryRow(process, spec, rule, workers, 4e-6 * values, held, taken, peak, most, taken <= most)


def _shard(codec: str) -> dict[str, Any]:
    told = {"be": "shard", "index": 0, "shards": 1, "run": RUN, "keys": None, "threads": 1}
    return {**told, "address": "tcp://127.0.0.1:0", "codecs": [codec]}


def _memory(peer: Peer) -> tuple[int, int]:
    """The bytes of memory a process has now, and the most it had."""
    with open(f"/proc/{peer.pid}/status") as file:
        peak = next((line for line in file if line.startswith("VmHWM:")), "VmHWM: 0 kB")
    return int(psutil.Process(peer.pid).memory_info().rss), 1024 * int(peak.split()[1])


def _hear(socket: zmq.SyncSocket, kind: Any) -> None:
    if not socket.poll(int(1e3 * PATIENCE_S)):
        raise ShoestringError("a shard of the benchmark does not answer", hint="please report this")
    message, _ = frames.decode([frame.buffer for frame in socket.recv_multipart(copy=False)])
    if not isinstance(message, kind):
        raise ShoestringError(f"a shard of the benchmark answered {message}", hint="please report this")
