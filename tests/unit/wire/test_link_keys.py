"""With keys members are served, and everyone else gets no byte through."""

import socket
from contextlib import suppress
from dataclasses import replace

import pytest
import zmq

from shoestring.errors import LinkError
from shoestring.wire import link
from shoestring.wire.keys import WorkerKeys
from tests.unit.wire.sockets import (
    FAILED,
    LIMIT,
    MEMBER,
    MEMBER_KEYS,
    OTHER,
    SHARD,
    SHARD_KEYS,
    WAIT_MS,
    deliver,
    next_event,
    raw_connection,
    read_to_end,
)

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
