"""When packets arrive that hosts send each other through a switch, one cable a host.

A cable carries `rate_mbit_s` each way, IP headers included, and a packet arrives
`delay_s` after it left. The switch passes a packet on while it still comes in, so on idle
cables its bits are paid for once; several hosts that send to one share that host's cable,
packet by packet in turn, whatever the size of their packets.

Nothing waits without bound. A packet that finds its sender's cable booked for `queue_bytes`
is lost; at a receiver's cable the newest packet of the sender that has most waiting is. With
one sender that is what a plain router drops, and no sender can shut another out.

`Switch` knows neither devices nor clocks: its times are given, and what arrives when does
not depend on how often or how late it is asked.
"""

import heapq
import math
from collections import deque
from itertools import count

from shoestring.bench.link.slowlink import Line

_PACKET_S = 1e-3  # a packet keeps the cable this long at most, within these bounds
_PACKET_BYTES = (1500, 65_000)
_QUEUE_PACKETS = 64


def packet_bytes(rate_mbit_s: float) -> int:
    """The largest packet (MTU) for a rate: few packets a second, but none that hold up others long."""
    least, most = _PACKET_BYTES
    return min(max(int(rate_mbit_s * 1e6 / 8 * _PACKET_S), least), most)


def queue_bytes(rate_mbit_s: float, delay_s: float) -> int:
    """What may wait for a cable: twice what is under way there and back, and 64 packets at least."""
    under_way = int(rate_mbit_s * 1e6 / 8 * 2 * delay_s)
    return max(_QUEUE_PACKETS * packet_bytes(rate_mbit_s), 2 * under_way)


def destination(packet: bytes) -> bytes:
    """The four bytes of an IPv4 packet's destination; empty for anything else."""
    return packet[16:20] if len(packet) >= 20 and packet[0] >> 4 == 4 else b""


class _Lane:
    """Packets of one sender that wait for a receiver's cable."""

    def __init__(self) -> None:
        self.waiting: deque[tuple[float, bytes]] = deque()
        self.held_bytes = 0


class _Port:
    """The way from the switch to one host: senders take turns on the line."""

    def __init__(self, hosts: int, rate_mbit_s: float, most_bytes: int) -> None:
        self.line = Line(rate_mbit_s)
        self.arriving: deque[tuple[float, bytes]] = deque()
        self.dropped = 0
        self._lanes = [_Lane() for _ in range(hosts)]
        self._turns: deque[_Lane] = deque()  # lanes with packets waiting, each once
        self._held_bytes = 0
        self._most_bytes = most_bytes

    def offer(self, source: int, packet: bytes, ready_s: float) -> None:
        """Queue a packet whose first bit is there at `ready_s`."""
        self.advance(ready_s)
        lane = self._lanes[source]
        if not lane.waiting:
            self._turns.append(lane)
        lane.waiting.append((ready_s, packet))
        self._hold(lane, len(packet))
        while self._held_bytes > self._most_bytes:
            longest = max(self._turns, key=lambda other: (other.held_bytes, other is lane))
            self._hold(longest, -len(longest.waiting.pop()[1]))
            self.dropped += 1
            if not longest.waiting:
                self._turns.remove(longest)
        self.advance(ready_s)

    def advance(self, now_s: float) -> None:
        """Put packets on the line, as long as it is free by `now_s`."""
        while self._turns and self.line.free_at_s <= now_s:
            lane = self._turns.popleft()
            ready_s, packet = lane.waiting.popleft()
            self._hold(lane, -len(packet))
            self.arriving.append((self.line.depart(ready_s, len(packet)), packet))
            if lane.waiting:
                self._turns.append(lane)

    def next_s(self) -> float:
        """When there is something to do; infinity if never."""
        starts_s = self.line.free_at_s if self._turns else math.inf
        return min(starts_s, self.arriving[0][0]) if self.arriving else starts_s

    def _hold(self, lane: _Lane, size_bytes: int) -> None:
        lane.held_bytes += size_bytes
        self._held_bytes += size_bytes


class Switch:
    """Hosts by number, each with a cable of its own. `delay_s` is one way, from host to host."""

    def __init__(self, hosts: int, rate_mbit_s: float, delay_s: float) -> None:
        self.queue_bytes = queue_bytes(rate_mbit_s, delay_s)
        self._bytes_s = rate_mbit_s * 1e6 / 8
        self.delay_s = delay_s
        self._senders = [Line(rate_mbit_s) for _ in range(hosts)]
        self._ports = [_Port(hosts, rate_mbit_s, self.queue_bytes) for _ in range(hosts)]
        self._flight: list[tuple[float, int, int, int, bytes]] = []  # a heap, by when the first bit is there
        self._order = count()  # of equal times, the packet offered first is first
        self._dropped = 0

    @property
    def dropped(self) -> int:
        """How many packets were lost for want of room."""
        return self._dropped + sum(port.dropped for port in self._ports)

    def offer(self, source: int, target: int, packet: bytes, now_s: float) -> None:
        """Take a packet from a host's card. Calls come in order of time."""
        line, size = self._senders[source], len(packet)
        if max(line.free_at_s - now_s, 0.0) * self._bytes_s + size > self.queue_bytes:
            self._dropped += 1
            return
        starts_s = max(line.free_at_s, now_s)
        line.depart(now_s, size)
        entry = (starts_s + self.delay_s, next(self._order), source, target, packet)
        heapq.heappush(self._flight, entry)

    def advance(self, now_s: float) -> list[tuple[float, int, bytes]]:
        """Let time pass until `now_s`; return what has arrived: when, at which host, the packet."""
        flight = self._flight
        while flight and flight[0][0] <= now_s:
            ready_s, _, source, target, packet = heapq.heappop(flight)
            self._ports[target].offer(source, packet, ready_s)
        arrived = []
        for host, port in enumerate(self._ports):
            port.advance(now_s)
            while port.arriving and port.arriving[0][0] <= now_s:
                arrived_s, packet = port.arriving.popleft()
                arrived.append((arrived_s, host, packet))
        return arrived

    def next_s(self) -> float:
        """When `advance` next has something to do; infinity if never."""
        lands_s = self._flight[0][0] if self._flight else math.inf
        return min(lands_s, *(port.next_s() for port in self._ports))
