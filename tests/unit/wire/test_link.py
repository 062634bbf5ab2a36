"""Real sockets on loopback: members are served, everyone else gets no byte through."""

import os
import socket
import stat
import struct
from contextlib import suppress
from dataclasses import replace

import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from shoestring.errors import LinkError
from shoestring.wire import link
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


@pytest.fixture
def context():
    made = zmq.Context()
    yield made
    made.destroy(linger=0)


@pytest.fixture
def listen(context):
    opened = []

    def open_one(address="tcp://127.0.0.1:0", *, keys=None, limit=LIMIT, **options):
        opened.append(link.Listener(context, address, keys=keys, max_message_bytes=limit, **options))
        return opened[-1]

    yield open_one
    for listener in opened:
        listener.close()


@pytest.fixture
def dial(context):
    opened = []  # a socket that nothing refers to is closed

    def connect_one(listener, *, keys=None, identity=b"worker-0", limit=LIMIT, **options):
        address = getattr(listener, "address", listener)
        opened.append(
            link.connect(context, address, keys=keys, identity=identity, max_message_bytes=limit, **options)
        )
        return opened[-1]

    return connect_one


@pytest.fixture
def intrude(context):
    """Connect as a program of one's own would: it queues at once and knows no rules."""

    def connect_one(listener, pair=None, server=None):
        dealer = context.socket(zmq.DEALER)
        dealer.linger = 0
        dealer.reconnect_ivl = 10
        if pair is not None:
            dealer.curve_publickey, dealer.curve_secretkey, dealer.curve_serverkey = (*pair, server)
        dealer.connect(listener.address)
        dealer.send_multipart([b"header", b"intruder"])
        return dealer

    return connect_one


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


@pytest.mark.parametrize(
    ("address", "local"),
    [
        ("ipc:///run/x", True),
        ("inproc://x", True),
        ("tcp://127.0.0.1:5", True),
        ("tcp://127.255.0.9:5", True),
        ("tcp://[::1]:5", True),
        ("tcp://[0:0::1]:5", True),
        ("tcp://localhost:*", True),
        ("tcp://0.0.0.0:0", False),
        ("tcp://*:0", False),
        ("tcp://[::]:0", False),
        ("tcp://[::ffff:127.0.0.1]:5", False),
        ("tcp://192.0.2.1:5", False),
        ("tcp://127.0.0.1.example.org:5", False),
        ("tcp://localhost.example.org:5", False),
        ("tcp://128.0.0.1:5", False),
        ("tcp://2130706433:5", False),
    ],
)
def test_is_local(address, local):
    assert link.is_local(address) is local


@pytest.mark.parametrize(
    ("address", "found"),
    [
        ("127.0.0.1:5555", "has no scheme"),
        ("", "has no scheme"),
        ("udp://127.0.0.1:5555", "unknown scheme `udp`"),
        ("TCP://127.0.0.1:5555", "unknown scheme `TCP`"),
        ("tcp://", "says no place"),
        ("tcp://127.0.0.1", "has no port"),
        ("tcp://127.0.0.1:", "has no port"),
        ("tcp://127.0.0.1:65536", "has no port"),
        ("tcp://127.0.0.1:-1", "has no port"),
        ("tcp://127.0.0.1:٣", "has no port"),
        ("tcp://:5555", "has the host ``"),
        ("tcp://::1:5555", "has the host `::1`"),
        ("tcp://[127.0.0.1]:5555", "where an IPv6 address goes"),
        ("tcp://192.0.2.1:0;127.0.0.1:5555", "has the host"),
        ("tcp://127.0.0.1 :5555", "has the host"),
        ("tcp://127.0.0.1\n:5555", "says no place"),
        ("ipc://", "says no place"),
        ("ipc://@abstract", "is no path"),
        ("ipc://*", "is no path"),
        ("ipc:///" + "x" * 107, "longer than the 107 bytes"),
    ],
)
def test_unusable_addresses_are_named(listen, dial, address, found):
    for use in (link.is_local, listen, dial):
        with pytest.raises(LinkError, match="address") as caught:
            use(address)
        assert f"`{address}`" in caught.value.message
        assert found in caught.value.message
        assert "tcp://" in caught.value.hint


@pytest.mark.parametrize(
    "address",
    ["tcp://0.0.0.0:0", "tcp://*:*", "tcp://[::]:0", "tcp://192.0.2.1:5555", "tcp://host.example:1"],
)
def test_nothing_beyond_the_machine_without_keys(listen, dial, address):
    for use in (listen, dial):
        with pytest.raises(LinkError, match="without keys") as caught:
            use(address)
        assert f"`{address}`" in caught.value.message
        assert "shoestring keys new" in caught.value.hint


def test_keys_let_a_shard_listen_everywhere(listen, dial):
    listener = listen("tcp://0.0.0.0:0", keys=SHARD_KEYS)
    assert listener.address == f"tcp://0.0.0.0:{port_of(listener)}"
    dealer = dial(f"tcp://127.0.0.1:{port_of(listener)}", keys=MEMBER_KEYS)
    assert deliver(dealer, listener, b"push") == [b"worker-0", b"push"]


@pytest.mark.parametrize("address", ["tcp://*:5555", "tcp://127.0.0.1:0"])
def test_an_address_to_listen_on_is_none_to_connect_to(dial, address):
    with pytest.raises(LinkError, match="is an address to listen on"):
        dial(address, keys=MEMBER_KEYS)


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:0", "tcp://localhost:*", "inproc://shard"])
@pytest.mark.parametrize("with_keys", [False, True])
def test_both_ways_over(listen, dial, address, with_keys):
    listener = listen(address, keys=SHARD_KEYS if with_keys else None)
    dealer = dial(listener, keys=MEMBER_KEYS if with_keys else None)
    assert deliver(dealer, listener, b"header", b"payload") == [b"worker-0", b"header", b"payload"]
    listener.socket.send_multipart([b"worker-0", b"header", b"answer"])
    assert dealer.poll(WAIT_MS)
    assert dealer.recv_multipart() == [b"header", b"answer"]
    assert listener.receive() is None


INTRUDERS = {
    "unknown key": ((OTHER.public, OTHER.secret), SHARD.public, zmq.EVENT_HANDSHAKE_FAILED_AUTH),
    "wrong server key": ((MEMBER.public, MEMBER.secret), OTHER.public, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL),
    "no key": (None, None, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL),
    "public key without its secret": (
        (MEMBER.public, OTHER.secret),
        SHARD.public,
        zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
    ),
}


@pytest.mark.parametrize("kind", INTRUDERS)
def test_no_byte_of_an_intruder_arrives_and_members_are_served(listen, dial, intrude, kind):
    pair, server, event = INTRUDERS[kind]
    listener = listen(keys=SHARD_KEYS)
    monitor = listener.socket.get_monitor_socket(FAILED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
    intruders = [intrude(listener, pair, server) for _ in range(3)]
    assert [next_event(monitor) for _ in range(3)] == [event] * len(intruders)
    assert listener.socket.poll(0) == 0
    member = dial(listener, keys=MEMBER_KEYS)
    assert deliver(member, listener, b"push") == [b"worker-0", b"push"]
    assert listener.socket.poll(0) == 0


def test_an_intruder_of_that_kind_would_get_through_without_keys(listen, intrude):
    listener = listen()
    intruder = intrude(listener)
    assert listener.socket.poll(WAIT_MS)
    intruder.close()
    assert [bytes(frame) for frame in listener.receive()[1:]] == [b"header", b"intruder"]


@pytest.mark.parametrize(
    "opening",
    [
        b"\x01\x00\x09\x00intruder",  # ZMTP 1.0
        b"\xff" + bytes(7) + b"\x01\x7f\x01\x05" + b"\x00\x00" + b"\x00\x08intruder",  # ZMTP 2.0
        b"GET / HTTP/1.1\r\nHost: shard\r\n\r\n",
    ],
)
def test_older_and_other_protocols_do_not_get_around_keys(listen, dial, opening):
    listener = listen(keys=SHARD_KEYS)
    with raw_connection(listener) as connection:
        connection.sendall(opening)
        with suppress(OSError):  # the listener was quicker to hang up
            connection.shutdown(socket.SHUT_WR)
        read_to_end(connection)
    assert deliver(dial(listener, keys=MEMBER_KEYS), listener, b"push") == [b"worker-0", b"push"]


def test_a_refused_worker_can_write_nothing(listen, dial):
    listener = listen(keys=SHARD_KEYS)
    monitor = listener.socket.get_monitor_socket(FAILED)
    refused = dial(listener, keys=WorkerKeys(OTHER, SHARD.public))
    assert next_event(monitor) == zmq.EVENT_HANDSHAKE_FAILED_AUTH
    with pytest.raises(zmq.Again):
        refused.send(b"push", zmq.NOBLOCK)


def test_a_revoked_key_is_cut_off_and_can_be_allowed_again(listen, dial):
    listener = listen(keys=replace(SHARD_KEYS, allowed=frozenset({MEMBER.public, OTHER.public})))
    member = dial(listener, keys=MEMBER_KEYS)
    other = dial(listener, keys=WorkerKeys(OTHER, SHARD.public), identity=b"worker-1")
    assert deliver(other, listener, b"before") == [b"worker-1", b"before"]

    listener.allow(frozenset({MEMBER.public}))
    other.send(b"after")  # its connection still stands
    assert listener.socket.poll(WAIT_MS)
    assert listener.receive() is None
    assert listener.socket.poll(0) == 0
    monitor = listener.socket.get_monitor_socket(FAILED)
    dial(listener, keys=WorkerKeys(OTHER, SHARD.public), identity=b"worker-2")
    assert next_event(monitor) == zmq.EVENT_HANDSHAKE_FAILED_AUTH
    assert deliver(member, listener, b"push") == [b"worker-0", b"push"]

    listener.allow(frozenset({OTHER.public}))
    again = dial(listener, keys=WorkerKeys(OTHER, SHARD.public), identity=b"worker-2")
    assert deliver(again, listener, b"back") == [b"worker-2", b"back"]


def test_a_listener_without_keys_has_no_allow_list(listen):
    with pytest.raises(LinkError, match="listens without keys"):
        listen().allow(frozenset())


def test_listeners_of_one_context_have_allow_lists_of_their_own(listen, dial):
    first = listen(keys=SHARD_KEYS)
    second = listen(keys=replace(SHARD_KEYS, allowed=frozenset({OTHER.public})))
    assert deliver(dial(first, keys=MEMBER_KEYS), first, b"push") == [b"worker-0", b"push"]
    monitor = second.socket.get_monitor_socket(FAILED)
    dial(second, keys=MEMBER_KEYS)
    assert next_event(monitor) == zmq.EVENT_HANDSHAKE_FAILED_AUTH
    first.close()
    other = dial(second, keys=WorkerKeys(OTHER, SHARD.public), identity=b"worker-1")
    assert deliver(other, second, b"push") == [b"worker-1", b"push"]


def test_listeners_can_follow_each_other_at_once(context):
    for _ in range(200):  # often enough that a late release of an address shows
        one = link.Listener(context, "tcp://127.0.0.1:0", keys=SHARD_KEYS, max_message_bytes=LIMIT)
        one.close()
        one.close()
    context.term()  # would not return if something were left open


def test_a_context_can_be_destroyed_before_its_listener():
    for _ in range(50):
        context = zmq.Context()
        one = link.Listener(context, "tcp://127.0.0.1:0", keys=SHARD_KEYS, max_message_bytes=LIMIT)
        context.destroy(linger=0)
        one.close()


def test_a_context_with_another_check_is_refused(context):
    taken = context.socket(zmq.REP)
    taken.bind("inproc://zeromq.zap.01")
    with pytest.raises(LinkError, match="another way") as caught:
        link.Listener(context, "tcp://127.0.0.1:0", keys=SHARD_KEYS, max_message_bytes=LIMIT)
    assert "context of its own" in caught.value.hint


def test_without_its_check_a_listener_lets_nobody_in(context, listen, dial):
    listener = listen(keys=SHARD_KEYS)
    monitor = listener.socket.get_monitor_socket(FAILED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
    with context.socket(zmq.REQ) as asker:
        asker.linger = 0
        asker.connect("inproc://zeromq.zap.01")
        asker.send(b"stop")
        listener._gate._thread.join(WAIT_MS / 1000)
    member = dial(listener, keys=MEMBER_KEYS)
    assert next_event(monitor) & FAILED
    assert not member.poll(0, zmq.POLLOUT)


def test_a_taken_port_is_named(listen):
    listener = listen()
    with pytest.raises(LinkError) as caught:
        listen(listener.address)
    assert caught.value.message == f"cannot listen on `{listener.address}`: Address already in use"
    assert f"ss -ltnp 'sport = :{port_of(listener)}'" in caught.value.hint


def test_an_address_of_another_machine_is_named(listen):
    with pytest.raises(LinkError, match=r"cannot listen on `tcp://192.0.2.1:\*`") as caught:
        listen("tcp://192.0.2.1:0", keys=SHARD_KEYS)
    assert "IP address of this machine" in caught.value.hint


@pytest.mark.parametrize("with_keys", [False, True])
def test_an_oversize_frame_costs_its_sender_the_connection(listen, dial, with_keys):
    listener = listen(keys=SHARD_KEYS if with_keys else None)
    keys = MEMBER_KEYS if with_keys else None
    largest = bytes(LIMIT)
    sender = dial(listener, keys=keys, limit=2 * LIMIT)
    assert deliver(sender, listener, b"", largest) == [b"worker-0", b"", largest]

    monitor = listener.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    sender.send_multipart([b"", largest + b"\0"])
    assert next_event(monitor) == zmq.EVENT_DISCONNECTED
    assert listener.socket.poll(0) == 0
    other = dial(listener, keys=keys, identity=b"worker-1")
    assert deliver(other, listener, b"push") == [b"worker-1", b"push"]


def test_a_frame_that_announces_a_terabyte_is_refused_at_its_header(listen, dial):
    listener = listen()
    with raw_connection(listener) as connection:
        greet(connection)
        connection.sendall(b"\x02" + struct.pack(">Q", 1 << 40))
        read_to_end(connection)
    assert deliver(dial(listener), listener, b"push") == [b"worker-0", b"push"]


def test_a_worker_refuses_oversize_frames_too(listen, dial):
    listener = listen()
    worker = dial(listener)
    assert deliver(worker, listener, b"pull") == [b"worker-0", b"pull"]
    monitor = worker.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    listener.socket.send_multipart([b"worker-0", bytes(LIMIT + 1)])
    assert next_event(monitor) == zmq.EVENT_DISCONNECTED
    worker.disable_monitor()
    assert worker.poll(0) == 0


@pytest.mark.parametrize(("limit", "queued"), [(0, 1), (-1, 1), (1023, 1), (LIMIT, 0)])
def test_limits_that_would_be_none_are_refused(listen, dial, limit, queued):
    for use in (listen, dial):
        with pytest.raises(LinkError, match="too low"):
            use("tcp://127.0.0.1:5555", limit=limit, max_queued=queued)


def test_an_unknown_worker_cannot_be_written_to(listen):
    with pytest.raises(zmq.ZMQError) as caught:
        listen().socket.send_multipart([b"nobody", b"answer"])
    assert caught.value.errno == zmq.EHOSTUNREACH


def test_a_worker_that_comes_back_takes_its_place(listen, dial):
    listener = listen()
    with raw_connection(listener) as before:  # it does not reconnect, as a libzmq socket would
        greet(before)
        before.sendall(b"\x00\x05hello")
        assert listener.socket.poll(WAIT_MS)
        assert [bytes(frame) for frame in listener.receive()] == [b"worker-0", b"hello"]
        worker = dial(listener)
        assert deliver(worker, listener, b"again") == [b"worker-0", b"again"]
        listener.socket.send_multipart([b"worker-0", b"welcome"])
        assert worker.poll(WAIT_MS)
        assert worker.recv() == b"welcome"


def test_a_worker_that_does_not_read_fills_a_bounded_queue_and_holds_up_nobody(listen, dial):
    listener = listen(limit=1 << 20, max_queued=4)
    slow, other = (dial(listener, identity=name, limit=1 << 20, max_queued=4) for name in (b"slow", b"other"))
    for dealer, name in ((slow, b"slow"), (other, b"other")):
        assert deliver(dealer, listener, b"pull") == [name, b"pull"]
    part = bytes(1 << 20)

    def fill():
        for _ in range(1000):
            listener.socket.send_multipart([b"slow", part])

    with pytest.raises(zmq.Again):
        fill()
    listener.socket.send_multipart([b"other", b"answer"])
    assert other.poll(WAIT_MS)
    assert other.recv() == b"answer"


def test_nothing_is_queued_for_a_shard_that_is_away(listen, dial):
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))  # bound but not listening: connecting is refused
        address = f"tcp://127.0.0.1:{reserved.getsockname()[1]}"
        worker = dial(address)
        monitor = worker.get_monitor_socket(zmq.EVENT_CONNECT_RETRIED)
        assert next_event(monitor) == zmq.EVENT_CONNECT_RETRIED
        worker.disable_monitor()
        with pytest.raises(zmq.Again):
            worker.send(b"push", zmq.NOBLOCK)
    assert deliver(worker, listen(address), b"again") == [b"worker-0", b"again"]


def test_a_peer_that_falls_silent_is_hung_up_on(listen, monkeypatch):
    monkeypatch.setattr(link, "HEARTBEAT_S", 0.05)
    monkeypatch.setattr(link, "HEARTBEAT_TIMEOUT_S", 0.1)
    with raw_connection(listen()) as connection:
        greet(connection)
        read_to_end(connection)


def test_a_handshake_that_does_not_go_on_is_hung_up_on(listen, monkeypatch):
    monkeypatch.setattr(link, "HANDSHAKE_S", 0.1)
    with raw_connection(listen(keys=SHARD_KEYS)) as connection:
        connection.sendall(b"\xff" + bytes(8) + b"\x7f\x03")
        read_to_end(connection)


def test_half_open_connections_do_not_keep_members_out(listen, dial):
    listener = listen(keys=SHARD_KEYS)
    idle = [raw_connection(listener) for _ in range(200)]
    try:
        assert deliver(dial(listener, keys=MEMBER_KEYS), listener, b"push") == [b"worker-0", b"push"]
    finally:
        for connection in idle:
            connection.close()


@pytest.mark.parametrize("with_keys", [False, True])
def test_ipc_is_for_its_owner_alone(listen, dial, tmp_path, with_keys):
    path = tmp_path / "made" / "s"
    listener = listen(f"ipc://{path}", keys=SHARD_KEYS if with_keys else None)
    assert listener.address == f"ipc://{path}"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    dealer = dial(listener, keys=MEMBER_KEYS if with_keys else None)
    assert deliver(dealer, listener, b"push") == [b"worker-0", b"push"]


def test_ipc_takes_nobodys_place(listen, dial, tmp_path):
    listener = listen(f"ipc://{tmp_path}/s")
    with pytest.raises(LinkError, match="another process does"):
        listen(listener.address)
    assert deliver(dial(listener), listener, b"push") == [b"worker-0", b"push"]


def test_ipc_replaces_a_socket_that_was_left_behind(listen, dial, tmp_path):
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(f"{tmp_path}/s")
    assert (tmp_path / "s").is_socket()
    listener = listen(f"ipc://{tmp_path}/s")
    assert deliver(dial(listener), listener, b"push") == [b"worker-0", b"push"]


def test_ipc_removes_no_file_that_is_no_socket(listen, tmp_path):
    file = tmp_path / "s"
    file.write_text("kept")
    with pytest.raises(LinkError, match="is no socket"):
        listen(f"ipc://{file}")
    assert file.read_text() == "kept"


def test_ipc_wants_a_private_folder(listen, tmp_path):
    os.chmod(tmp_path, 0o755)
    with pytest.raises(LinkError, match="others may enter") as caught:
        listen(f"ipc://{tmp_path}/s")
    assert f"chmod 700 {tmp_path}" in caught.value.hint
    (tmp_path / "file").touch()
    with pytest.raises(LinkError, match="Not a directory|File exists"):
        listen(f"ipc://{tmp_path}/file/s")
