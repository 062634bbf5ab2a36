"""Keys and sockets to test links with: members, and connections made by hand."""

import socket
import struct

import zmq
from zmq.utils.monitor import recv_monitor_message

from shoestring.wire.keys import KeyPair, ShardKeys, WorkerKeys

WAIT_MS = 20_000
LIMIT = 1 << 16
FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


def new_pair():
    return KeyPair(*zmq.curve_keypair())


SHARD, MEMBER, OTHER = new_pair(), new_pair(), new_pair()
SHARD_KEYS = ShardKeys(SHARD, frozenset({MEMBER.public}))
MEMBER_KEYS = WorkerKeys(MEMBER, SHARD.public)


def deliver(dealer, listener, *frames):
    """Send a message and return the next one that arrives."""
    assert dealer.poll(WAIT_MS, zmq.POLLOUT), "never let in"
    dealer.send_multipart(frames)
    assert listener.socket.poll(WAIT_MS), "never arrived"
    return [bytes(frame) for frame in listener.receive()]


def next_event(monitor):
    assert monitor.poll(WAIT_MS), "no event"
    return recv_monitor_message(monitor)["event"]


def raw_connection(listener):
    return socket.create_connection(("127.0.0.1", port_of(listener)), timeout=WAIT_MS / 1000)


def port_of(listener):
    return int(listener.address.rpartition(":")[2])


def greet(connection):
    """Do the handshake of ZMTP 3.0 as `worker-0` without keys, by hand."""
    connection.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32))
    ready = b"\x05READY" + b"\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
    ready += b"\x08Identity" + struct.pack(">I", 8) + b"worker-0"
    connection.sendall(bytes([4, len(ready)]) + ready)
    with connection.makefile("rb", buffering=0) as reader:
        greeting = read_exactly(reader, 64)
        assert greeting[12:16] == b"NULL"
        kind, size = read_exactly(reader, 2)
        assert kind == 4
        assert read_exactly(reader, size).startswith(b"\x05READY")


def read_exactly(reader, size):
    content = b""
    while len(content) < size:
        more = reader.read(size - len(content))
        assert more, "hung up"
        content += more
    return content


def read_to_end(connection):
    """Read until the other side hangs up."""
    try:
        while connection.recv(4096):
            pass
    except ConnectionResetError:
        pass
