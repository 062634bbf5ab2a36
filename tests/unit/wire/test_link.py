"""Real sockets on loopback: addresses, limits, queues, and peers that come and go."""

import os
import socket
import stat
import struct

import pytest
import zmq

from shoestring.errors import LinkError
from shoestring.wire import link
from tests.unit.wire.sockets import (
    LIMIT,
    MEMBER_KEYS,
    SHARD_KEYS,
    WAIT_MS,
    deliver,
    greet,
    next_event,
    port_of,
    raw_connection,
    read_to_end,
)


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
