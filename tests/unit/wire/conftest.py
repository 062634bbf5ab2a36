"""Listeners and workers on loopback that are closed after the test."""

import pytest
import zmq

from shoestring.wire import link
from tests.unit.wire.sockets import (
    LIMIT,
)


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
