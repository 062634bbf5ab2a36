"""The connection of a program that is no worker to one shard."""

import math
import time
from collections import deque
from collections.abc import Iterator

import zmq

from shoestring.errors import WireError
from shoestring.wire import frames
from shoestring.wire import messages as say
from shoestring.wire.keys import WorkerKeys
from shoestring.wire.link import connect
from shoestring.wire.messages import Message

_QUEUED = 4096  # messages; a round is one for each part


class Line:
    """Sends messages once the connection is there, and gives what comes."""

    def __init__(self, address: str, keys: WorkerKeys | None, identity: bytes) -> None:
        self.address = address
        self.heard_at = -math.inf
        self._unsent: deque[Message] = deque()
        self.socket = connect(
            zmq.Context.instance(),
            address,
            keys=keys,
            identity=identity,
            max_message_bytes=frames.PAYLOAD_LIMIT,
            max_queued=_QUEUED,
        )

    @property
    def was_heard(self) -> bool:
        """Whether the shard has said anything yet."""
        return self.heard_at > -math.inf

    @property
    def events(self) -> int:
        """What to poll the socket for."""
        return zmq.POLLIN | zmq.POLLOUT if self._unsent else zmq.POLLIN

    def send(self, message: Message) -> None:
        """Send a message as soon as that is possible; of messages like one that still waits, none is kept."""
        if isinstance(message, say.Beat) and self._unsent:
            return
        if message not in self._unsent:
            self._unsent.append(message)
        self.flush()

    def flush(self) -> None:
        """Send what can be sent."""
        while self._unsent:
            try:
                self.socket.send_multipart(frames.encode(self._unsent[0]), zmq.NOBLOCK)
            except zmq.Again:
                return
            self._unsent.popleft()

    def receive(self) -> Iterator[tuple[Message, memoryview]]:
        """What has come in; what was damaged on its way is asked for again."""
        while True:
            try:
                received = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self.heard_at = time.monotonic()
            try:
                yield frames.decode([frame.buffer for frame in received])
            except WireError:
                continue

    def close(self, linger_ms: int) -> None:
        """Close the connection; what was sent has so long to leave."""
        self.socket.close(linger=linger_ms)
