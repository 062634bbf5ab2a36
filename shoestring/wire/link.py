"""Sockets between workers and shards: a shard's `Listener`, a worker's `connect`.

Promises: beyond this machine nothing listens and nothing connects without keys. With
keys, a byte reaches the application only from a process that holds the secret of an
allowed key and expected this very shard; everyone else fails in the handshake, while
members are served. A frame above `max_message_bytes` is refused before there is
memory for it and costs its sender the connection. A peer that vanishes is noticed
within about `HEARTBEAT_TIMEOUT_S`.

Queues are bounded. A socket holds at most `max_queued` whole messages for each peer
and direction (`MAX_QUEUED` unless told; with parts of 4 MB about 256 MB), beside what
the kernel buffers. When a worker does not read, a shard's `send` raises `zmq.Again` at
once, so that one slow worker holds up nobody; to a worker that is not connected it
raises `zmq.ZMQError` with `EHOSTUNREACH`. When a shard does not read, the worker waits.

Nothing bounds the number of frames in one message: whoever may send can fill memory
with a message that does not end. That is why only members may send.
"""

import ipaddress
import itertools
import os
import re
import socket
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock, Thread
from typing import ClassVar

import zmq
from zmq.utils import z85

from shoestring.errors import LinkError
from shoestring.wire.keys import ShardKeys, WorkerKeys

MAX_QUEUED = 64
HEARTBEAT_S = 5.0
# A frame on its way holds up the answer: 4 MB on a link of 2 Mbit/s must still be in time.
HEARTBEAT_TIMEOUT_S = 30.0
HANDSHAKE_S = 10.0
MIN_MESSAGE_BYTES = 1024  # the handshake's own frames count towards the limit

_BACKLOG = 1024  # a flood of connections waits in the kernel and does not push members out
_CURVE_BYTES = 33  # what encryption adds to a frame
_IPC_BYTES = 107  # the longest name of a Unix socket
_HOST = re.compile(r"[A-Za-z0-9_.-]+")


@dataclass(frozen=True)
class _Endpoint:
    scheme: str
    host: str  # of inproc the name, of ipc the path
    port: int | None = None

    def __str__(self) -> str:
        if self.port is None:
            return f"{self.scheme}://{self.host}"
        host = f"[{self.host}]" if self.is_ipv6 else self.host
        return f"{self.scheme}://{host}:{self.port or '*'}"

    @property
    def is_ipv6(self) -> bool:
        return self.scheme == "tcp" and ":" in self.host

    @property
    def is_local(self) -> bool:
        if self.scheme != "tcp":
            return True
        # A name is not trusted to mean what it did when it was looked up.
        with suppress(ValueError):
            return ipaddress.ip_address(self.host).is_loopback
        return False


def is_local(address: str) -> bool:
    """Tell whether an address stays on this machine: ipc, inproc, or TCP over loopback."""
    return _parse(address).is_local


class Listener:
    """A shard's socket: a bound ROUTER that only members get through to.

    `address` is where it really listens: port 0 or `*` picks a free one. Not
    thread-safe, but for `allow`. Listeners may share a context.
    """

    _numbers: ClassVar = itertools.count()

    def __init__(
        self,
        context: zmq.SyncContext,
        address: str,
        *,
        keys: ShardKeys | None,
        max_message_bytes: int,
        max_queued: int = MAX_QUEUED,
    ) -> None:
        endpoint = _parse(address)
        if keys is None and not endpoint.is_local:
            raise LinkError(
                f"a shard may not listen on `{address}` without keys, as other machines can reach it",
                hint="write keys with `shoestring keys new shard` and `shoestring keys new worker-0`, "
                "or listen on 127.0.0.1",
            )
        self._domain = f"shoestring-{next(self._numbers)}".encode()
        self._followers: frozenset[bytes] = keys.followers if keys is not None else frozenset()
        if endpoint.scheme == "ipc":
            _claim(Path(endpoint.host))
        self.socket: zmq.SyncSocket = context.socket(zmq.ROUTER)
        self._gate: _Gate | None = None
        try:
            _configure(self.socket, endpoint, max_message_bytes, max_queued, keys)
            self.socket.setsockopt(zmq.BACKLOG, _BACKLOG)
            self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            self.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a worker that comes back takes its place
            self.socket.setsockopt(zmq.SNDTIMEO, 0)
            if keys is not None and endpoint.scheme != "inproc":  # where there is no handshake
                self.socket.setsockopt(zmq.CURVE_SERVER, 1)
                self.socket.setsockopt(zmq.ZAP_DOMAIN, self._domain)
                # Without this, libzmq lets everyone in whenever the gate is gone.
                self.socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
                self._gate = _Gate.of(context)
                self._gate.allowed[self._domain] = keys.allowed
            _bind(self.socket, endpoint)
        except BaseException:
            self.close()
            raise
        self.address = self.socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")

    def allow(self, keys: frozenset[bytes]) -> None:
        """Replace the allow-list: others get no new connection, and `receive` drops what they send."""
        if self._gate is None:
            raise LinkError(
                f"`{self.address}` listens without keys, so anyone on this machine is allowed",
                hint="give the listener keys",
            )
        self._gate.allowed[self._domain] = keys

    def receive(self) -> list[zmq.Frame] | None:
        """Take one message, its sender's identity first; None if none waits, or a revoked key sent it."""
        try:
            frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        # libzmq asks for a key once, when it connects; a connection outlives a revocation.
        if self._gate is not None:
            key = str(frames[-1].get("User-Id")).encode()
            if key not in self._gate.allowed[self._domain]:
                return None
        return frames

    def may_push(self, frames: list[zmq.Frame]) -> bool:
        """Whether what `receive` gave came from a key that may do more than read."""
        if not self._followers or self._gate is None:
            return True
        return str(frames[-1].get("User-Id")).encode() not in self._followers

    def close(self) -> None:
        """Stop listening and drop what is queued. May be called again."""
        self.socket.close(linger=0)
        if self._gate is not None:
            self._gate.leave(self._domain)
            self._gate = None


def connect(
    context: zmq.SyncContext,
    address: str,
    *,
    keys: WorkerKeys | None,
    identity: bytes,
    max_message_bytes: int,
    max_queued: int = MAX_QUEUED,
) -> zmq.SyncSocket:
    """Return a worker's DEALER, which can be written to once the shard has let it in, not before.

    It reconnects by itself when a connection ends, but gives up for good when the shard refused
    its key or a frame was damaged. When a shard has not answered for too long, close the socket
    and connect again. An `identity` is for one process: two would push each other out, over and
    over, and lose what they send.
    """
    endpoint = _parse(address)
    if keys is None and not endpoint.is_local:
        raise LinkError(
            f"a worker may not connect to `{address}` without keys, as it is on another machine",
            hint="write keys with `shoestring keys new`, and give both sides theirs",
        )
    if endpoint.port == 0 or endpoint.host == "*":
        raise LinkError(
            f"`{address}` is an address to listen on", hint="connect to the host and port the shard shows"
        )
    dealer: zmq.SyncSocket = context.socket(zmq.DEALER)
    try:
        _configure(dealer, endpoint, max_message_bytes, max_queued, keys)
        dealer.setsockopt(zmq.IDENTITY, identity)
        # Queue nothing for a shard that is away: a push is sent again by name, so what was queued
        # for the shard before would only reach the next one late and twice. And a key that is not
        # allowed shows, as a socket that never becomes writable.
        dealer.setsockopt(zmq.IMMEDIATE, 1)
        dealer.setsockopt(zmq.RECONNECT_IVL, 100)
        dealer.setsockopt(zmq.RECONNECT_IVL_MAX, 5_000)
        dealer.setsockopt(zmq.CONNECT_TIMEOUT, 5_000)  # the kernel's own is minutes
        if keys is not None:
            dealer.setsockopt(zmq.CURVE_SERVERKEY, keys.shard_public)
        dealer.connect(str(endpoint))
    except BaseException:
        dealer.close(linger=0)
        raise
    return dealer


class _Gate:
    """Answers libzmq's question whether a key may come in, for all listeners of one context.

    They are ZeroMQ's authentication protocol (ZAP): six frames and the key in, six frames
    out, over an address that exists once a context. `zmq.auth` has a handler too, but one
    that cannot be started again at once after it was stopped.
    """

    _ADDRESS = "inproc://zeromq.zap.01"
    _STOP: ClassVar = [b"stop"]
    _open: ClassVar[dict[zmq.SyncContext, "_Gate"]] = {}
    _lock: ClassVar = Lock()

    def __init__(self, context: zmq.SyncContext) -> None:
        self.allowed: dict[bytes, frozenset[bytes]] = {}  # for each listener's domain
        self._context = context
        self._listeners = 0
        # A shadow, so that `context.destroy()` does not close the socket from under the thread.
        zap: zmq.SyncSocket = zmq.Context.shadow(context).socket(zmq.REP)
        zap.setsockopt(zmq.LINGER, 0)
        try:
            zap.bind(self._ADDRESS)
        except zmq.ZMQError:
            zap.close()
            raise LinkError(
                "this ZeroMQ context already checks keys in another way",
                hint="give the shard a context of its own",
            ) from None
        self._thread = Thread(target=self._answer, args=(zap,), name="shoestring-gate", daemon=True)
        self._thread.start()

    @classmethod
    def of(cls, context: zmq.SyncContext) -> "_Gate":
        """Return the gate of a context for one more listener."""
        with cls._lock:
            if context not in cls._open:
                cls._open[context] = cls(context)
            cls._open[context]._listeners += 1
            return cls._open[context]

    def leave(self, domain: bytes) -> None:
        """Forget a listener; after the last one, end the thread."""
        with self._lock:
            self.allowed.pop(domain, None)
            self._listeners -= 1
            if self._listeners > 0:
                return
            del self._open[self._context]
            # A context that was ended first has ended the thread too.
            with suppress(zmq.ZMQError), self._context.socket(zmq.REQ) as asker:
                asker.setsockopt(zmq.LINGER, 0)
                asker.connect(self._ADDRESS)
                asker.send_multipart(self._STOP)
                self._thread.join()

    def _answer(self, zap: zmq.SyncSocket) -> None:
        with suppress(zmq.ZMQError), zap:
            while (question := zap.recv_multipart()) != self._STOP:
                zap.send_multipart(self._judge(question))
            zap.unbind(self._ADDRESS)  # closing alone would free the address some time later

    def _judge(self, question: list[bytes]) -> list[bytes]:
        number = question[1] if len(question) > 1 else b""
        if len(question) == 7:
            version, _, domain, _, _, mechanism, key = question
            if (version, mechanism, len(key)) == (b"1.0", b"CURVE", 32):
                name = z85.encode(key)
                if name in self.allowed.get(domain, frozenset()):
                    return [b"1.0", number, b"200", b"OK", name, b""]
        return [b"1.0", number, b"400", b"not allowed", b"", b""]


def _configure(
    sock: zmq.SyncSocket,
    endpoint: _Endpoint,
    max_message_bytes: int,
    max_queued: int,
    keys: ShardKeys | WorkerKeys | None,
) -> None:
    if max_message_bytes < MIN_MESSAGE_BYTES or max_queued < 1:
        raise LinkError(
            f"a limit of {max_message_bytes} bytes a frame or {max_queued} messages is too low",
            hint=f"allow at least {MIN_MESSAGE_BYTES} bytes and 1 message",  # 0 would mean no limit
        )
    sock.setsockopt(zmq.LINGER, 0)
    sock.setsockopt(zmq.SNDHWM, max_queued)
    sock.setsockopt(zmq.RCVHWM, max_queued)
    sock.setsockopt(zmq.MAXMSGSIZE, max_message_bytes + (0 if keys is None else _CURVE_BYTES))
    sock.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_S * 1000))
    sock.setsockopt(zmq.HEARTBEAT_IVL, int(HEARTBEAT_S * 1000))
    sock.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(HEARTBEAT_TIMEOUT_S * 1000))
    # For routers between that forget quiet connections, and for a peer that is still in the handshake.
    sock.setsockopt(zmq.TCP_KEEPALIVE, 1)
    sock.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 30)
    sock.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 10)
    sock.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)
    sock.setsockopt(zmq.IPV6, int(endpoint.is_ipv6))
    if keys is not None:
        sock.setsockopt(zmq.CURVE_PUBLICKEY, keys.pair.public)
        sock.setsockopt(zmq.CURVE_SECRETKEY, keys.pair.secret)


def _bind(sock: zmq.SyncSocket, endpoint: _Endpoint) -> None:
    try:
        sock.bind(str(endpoint))
    except zmq.ZMQError as error:
        hint = "give an IP address of this machine, or `*` for all of them"
        if error.errno == zmq.EADDRINUSE:
            command = f"`ss -ltnp 'sport = :{endpoint.port}'`"
            hint = (
                f"give another port; {command} shows who listens there" if endpoint.port else "give another"
            )
        raise LinkError(
            f"cannot listen on `{endpoint}`: {zmq.strerror(error.errno or 0)}", hint=hint
        ) from None
    if endpoint.scheme == "ipc":
        os.chmod(endpoint.host, 0o600)


def _parse(address: str) -> _Endpoint:
    """Take an address apart. What is checked is what is used: nothing else reaches libzmq."""
    scheme, separator, rest = address.partition("://")
    if not separator or scheme not in ("tcp", "ipc", "inproc"):
        raise _unusable(address, f"has the unknown scheme `{scheme}`" if separator else "has no scheme")
    if not rest.isprintable() or not rest:
        raise _unusable(address, "says no place")
    if scheme == "inproc":
        return _Endpoint(scheme, rest)
    if scheme == "ipc":
        if rest.startswith("@") or rest == "*":
            raise _unusable(address, "is no path")
        if len(os.fsencode(rest)) > _IPC_BYTES:
            raise _unusable(address, f"is longer than the {_IPC_BYTES} bytes a path may have")
        return _Endpoint(scheme, rest)
    host, _, port = rest.rpartition(":")
    if port != "*" and not (port.isascii() and port.isdecimal() and len(port) <= 5 and int(port) < 65536):
        raise _unusable(address, "has no port of 0 to 65535")
    return _Endpoint(scheme, _parse_host(host, address), 0 if port == "*" else int(port))


def _parse_host(host: str, address: str) -> str:
    if host.startswith("[") and host.endswith("]"):
        with suppress(ValueError):
            return str(ipaddress.IPv6Address(host[1:-1]))
        raise _unusable(address, f"has `{host}` where an IPv6 address goes")
    if host == "localhost":
        return "127.0.0.1"  # listening takes no names, and so both sides mean the same
    if host != "*" and not _HOST.fullmatch(host):
        raise _unusable(address, f"has the host `{host}`")
    return host


def _unusable(address: str, what: str) -> LinkError:
    return LinkError(
        f"the address `{address}` {what}",
        hint="write it like `tcp://192.168.1.5:5555`, `tcp://[fd00::5]:5555` or `ipc:///run/user/1000/shard`",
    )


def _claim(path: Path) -> None:
    """Make sure that a Unix socket can be made in a private folder, and takes nobody's place."""
    folder = path.parent
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise LinkError(
                f"others may enter `{folder}`, so a socket there would not be yours alone",
                hint=f"give it a folder of its own, or run `chmod 700 {folder}`",
            )
        # libzmq would remove whatever is there, also from under a shard that listens.
        if path.exists():
            if not stat.S_ISSOCK(path.stat().st_mode):
                raise LinkError(f"`{path}` is there, but is no socket", hint="give another path")
            _remove_stale(path)
    except OSError as error:
        raise LinkError(
            f"cannot listen on `ipc://{path}`: {error.strerror}", hint="give a path in a folder of your own"
        ) from None


def _remove_stale(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except BlockingIOError:
            pass  # someone listens, and is busy
    raise LinkError(
        f"cannot listen on `ipc://{path}`: another process does", hint="stop it, or give another path"
    )
