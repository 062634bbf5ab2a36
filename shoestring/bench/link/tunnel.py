"""The process that is the switch between hosts: it reads and writes their network cards.

Each card is a TUN device: what a host sends on it comes out of a descriptor as an IP
packet, and what is written there the host receives. One process holds the descriptors of
all of them and hands each packet over when a `Switch` says that it arrives. This is how a
link gets a delay on any Linux kernel, also one without `netem`.

The process ends when its standard input does, so it never outlives the one that started
it; with it go the cards. What is written late is only ever late: never early, never changed.
"""

import contextlib
import errno
import fcntl
import math
import os
import select
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from shoestring.bench.link.switch import Switch, destination
from shoestring.errors import ShoestringError

_DEVICE = Path("/dev/net/tun")
_NUMBER = os.makedev(10, 200)
_SET_INTERFACE = 0x400454CA  # TUNSETIFF
_IS_TUN, _IS_BARE = 0x0001, 0x1000  # IP packets, and nothing before them
_READ_BYTES = 1 << 16
_READS = 16  # of one card, then the others get their turn
# Where it is little beside the delay, wait for more before each turn: that halves the turns' cost.
_PAUSE_S, _PAUSES = 0.5e-3, 40
_START_S, _LEAVE_S = 30.0, 10.0
_PRIORITY = 1  # the lowest of those that go before all ordinary processes
_HINT = "run as root on a kernel with TUN devices, or choose a link without a delay"


def open_device(name: str) -> int:
    """Make a network card in this namespace; it goes when the last copy of the descriptor does."""
    try:
        with _node() as node:
            descriptor = os.open(node, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise ShoestringError(f"`{_DEVICE}` cannot be opened: {error.strerror}", hint=_HINT) from None
    try:
        asked = struct.pack("16sH22x", name.encode(), _IS_TUN | _IS_BARE)
        fcntl.ioctl(descriptor, _SET_INTERFACE, asked)
    except OSError as error:
        os.close(descriptor)
        raise ShoestringError(f"no network card `{name}`: {error.strerror}", hint=_HINT) from None
    return descriptor


@contextlib.contextmanager
def _node() -> Iterator[Path]:
    """The device file; one of our own, where a container came without it."""
    if _DEVICE.exists():
        yield _DEVICE
        return
    with tempfile.TemporaryDirectory(prefix="shoestring-", dir=_DEVICE.parent.parent) as folder:
        node = Path(folder) / _DEVICE.name
        os.mknod(node, stat.S_IFCHR | 0o600, _NUMBER)
        yield node


@contextlib.contextmanager
def running(cards: Mapping[str, int], rate_mbit_s: float, delay_s: float) -> Iterator[int]:
    """Join the cards, descriptors by IP address, with a process of its own; give its id.

    The caller closes its own copies, so that the cards go when the process does.
    """
    words = [sys.executable, "-m", __name__, str(rate_mbit_s), str(delay_s)]
    words += [f"{address}={descriptor}" for address, descriptor in cards.items()]
    with tempfile.TemporaryFile() as complaints:
        process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=complaints,
            pass_fds=tuple(cards.values()),
            start_new_session=True,  # Ctrl-C is for us: it ends when we say so
        )
        try:
            assert process.stdout is not None
            is_told, _, _ = select.select([process.stdout], [], [], _START_S)
            if not is_told or not process.stdout.read(1):
                raise _failure(complaints.fileno())
            yield process.pid
        finally:
            _end(process)
        if process.returncode != 0:
            raise _failure(complaints.fileno())


def _end(process: "subprocess.Popen[bytes]") -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdout, contextlib.suppress(OSError):
        process.stdin.close()
    try:
        process.wait(_LEAVE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _failure(complaints: int) -> ShoestringError:
    said = os.pread(complaints, 1 << 16, 0).decode(errors="replace").strip().splitlines()[-1:]
    return ShoestringError(
        f"the switch between the hosts failed: {' '.join(said) or 'it gave no reason'}",
        hint="please report this",
    )


def carry(cards: Mapping[bytes, int], switch: Switch, stop: int) -> None:
    """Carry packets between cards, descriptors by address, until `stop` can be read."""
    numbers = {address: host for host, address in enumerate(cards)}
    descriptors = list(cards.values())
    hosts = {descriptor: host for host, descriptor in enumerate(descriptors)}
    # Not `selectors`, whose default rounds up to milliseconds; and this is the loop that costs.
    watched = [*descriptors, stop]
    pause_s = _PAUSE_S if switch.delay_s >= _PAUSES * _PAUSE_S else 0.0
    while True:
        for _, host, packet in switch.advance(time.monotonic()):
            _write(descriptors[host], packet)
        next_s = switch.next_s()
        wait_s = None if next_s == math.inf else max(next_s - pause_s - time.monotonic(), 0.0)
        ready, _, _ = select.select(watched, [], [], wait_s)
        if pause_s:
            # Packets gather meanwhile: fewer turns of this loop, for a small part of the link's delay.
            time.sleep(pause_s)
            ready, _, _ = select.select(watched, [], [], 0)
        if stop in ready:
            return
        for descriptor in ready:
            for packet in _read(descriptor):
                target = numbers.get(destination(packet))
                if target is not None:
                    switch.offer(hosts[descriptor], target, packet, time.monotonic())


def _read(descriptor: int) -> Iterator[bytes]:
    try:
        for _ in range(_READS):
            packet = os.read(descriptor, _READ_BYTES)
            if not packet:
                raise OSError(errno.ENODEV, "a network card is gone")
            yield packet
    except BlockingIOError:
        pass


def _write(descriptor: int, packet: bytes) -> None:
    # A card that is down or full loses packets, as others do; one that is gone, `_read` tells.
    with contextlib.suppress(OSError):
        os.write(descriptor, packet)


def _main(rate: str, delay: str, *cards: str) -> None:
    # What is measured uses all cores: a packet that waited for one would be milliseconds late.
    # Where that is not allowed they are late, and nothing else is different.
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(_PRIORITY))
    pairs = (card.split("=") for card in cards)
    descriptors = {socket.inet_aton(address): int(descriptor) for address, descriptor in pairs}
    switch = Switch(len(descriptors), float(rate), float(delay))
    print(flush=True)
    carry(descriptors, switch, sys.stdin.fileno())


if __name__ == "__main__":
    _main(*sys.argv[1:])
