"""Hosts to measure between: this machine's loopback, or network namespaces with a slow link.

Each namespace is a host of its own with a loopback and one network card. Links of a rate
alone join two: the cards are the ends of a virtual cable, and the kernel's token bucket
(`tbf`) holds what each end sends to the rate. Links of a rate and a delay join up to eight
through a switch (`tunnel`). Both need root and iproute2. `loopback` is this machine's own,
or for an exact count of bytes that of one namespace, which all hosts share.

Names are unique, and everything is removed at the end, also after a failure or Ctrl-C: with
a namespace goes its card.
"""

import contextlib
import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

from shoestring.bench.link import switch, tunnel
from shoestring.errors import ShoestringError, UsageError

HOSTS = 2
MOST_HOSTS = 8
LOOPBACK = "loopback"
# Bits a second, and what may leave at once: 2 ms of it, at least a few packets.
_RATES = {"1gbit": (1_000_000_000, 256_000), "100mbit": (100_000_000, 32_000)}
LINKS = (LOOPBACK, *_RATES)
# Bits a second, and seconds there and back.
_DELAYS = {
    "1gbit-1ms": (1_000_000_000, 0.001),
    "100mbit-10ms": (100_000_000, 0.01),
    "10mbit-40ms": (10_000_000, 0.04),
}
DELAYED_LINKS = tuple(_DELAYS)
_QUEUE_MS = 50
_CARD = "cable"
_TOKEN_BYTES = 5  # so the names of cards have 15 characters, the most there may be
_FRAME_BYTES = 14  # Ethernet's header, which the ends of a virtual cable count and other cards do not
_TOOL_S = 20.0
_HINT = "run as root with iproute2, or measure `--link loopback` alone"


@dataclass(frozen=True)
class Hosts:
    """Some hosts and the link between them. `spaces` are empty where all are this machine."""

    link: str = LOOPBACK
    spaces: tuple[str, ...] = ()
    count: int = HOSTS

    @property
    def are_apart(self) -> bool:
        """Whether processes of these hosts reach each other over a network alone."""
        return bool(self.spaces)

    @property
    def rate_bits_s(self) -> int | None:
        """What each host can send at most; None: no limit but the machine."""
        rate, _ = _RATES.get(self.link) or _DELAYS.get(self.link) or (None, None)
        return rate

    @property
    def round_trip_s(self) -> float:
        """What the link adds to the time there and back."""
        return _DELAYS[self.link][1] if self.link in _DELAYS else 0.0

    @property
    def card(self) -> str:
        """The network card that leads to the other hosts."""
        return "lo" if self.link == LOOPBACK else _CARD

    def command(self, host: int, *words: str) -> list[str]:
        """What to execute so that a command runs on a host."""
        return ["ip", "netns", "exec", self.spaces[host], *words] if self.spaces else list(words)

    def address(self, host: int, seen_from: int) -> str:
        """The IP address by which one host reaches another, or itself."""
        is_here = self.link == LOOPBACK or host == seen_from
        return "127.0.0.1" if is_here else _address(host)

    def sent_bytes(self, host: int) -> int:
        """What left by the host's card so far: IP packets with their headers, also those sent again.

        Hosts that share a loopback share its count: what all of them sent, also each to itself.
        """
        return self._crossed_bytes(host, 8)

    def received_bytes(self, host: int) -> int:
        """What came in by the host's card so far; as `sent_bytes`, but for what was lost under way."""
        return self._crossed_bytes(host, 0)

    def _crossed_bytes(self, host: int, column: int) -> int:
        lines = _do(*self.command(host, "cat", "/proc/net/dev")).splitlines()
        counts = next(line for line in lines if line.strip().startswith(f"{self.card}:"))
        crossed, packets = (int(word) for word in counts.split(":")[1].split()[column : column + 2])
        return crossed - _FRAME_BYTES * packets if self.link in _RATES else crossed


def missing(link: str, *, own_space: bool = False) -> str:
    """Say why a link cannot be had here; empty if it can."""
    if link == LOOPBACK and not own_space:
        return ""
    tools = [tool for tool in (("ip", "tc") if link in _RATES else ("ip",)) if shutil.which(tool) is None]
    if tools:
        return f"`{tools[0]}` is not installed"
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        with connected(link, own_space=own_space):
            return ""
    except ShoestringError as error:
        return error.message


@contextlib.contextmanager
def connected(link: str, hosts: int = HOSTS, *, own_space: bool = False) -> Iterator[Hosts]:
    """Give hosts joined by a link; take them away again at the end.

    `own_space`: a loopback that carries nothing but what these hosts send.
    """
    if link not in (*LINKS, *DELAYED_LINKS):
        known = ", ".join((*LINKS, *DELAYED_LINKS))
        raise UsageError(f"there is no link `{link}`", hint=f"one of {known}")
    if not 1 <= hosts <= MOST_HOSTS:
        raise UsageError(f"{hosts} hosts", hint=f"give 1 to {MOST_HOSTS}")
    if link in _RATES and hosts != HOSTS:
        raise UsageError(
            f"`{link}` joins two hosts, not {hosts}", hint=f"use one of {', '.join(DELAYED_LINKS)}"
        )
    with contextlib.ExitStack() as made:
        if link in _DELAYS:
            spaces = _make_switched(made, link, hosts)
        elif link in _RATES:
            spaces = _make_cabled(made, link)
        else:
            spaces = _make_spaces(made, secrets.token_hex(_TOKEN_BYTES), 1) * hosts if own_space else ()
        yield Hosts(link, spaces, hosts)


def _make_spaces(made: contextlib.ExitStack, token: str, hosts: int) -> tuple[str, ...]:
    spaces = tuple(f"shoestring-{token}-{host}" for host in range(hosts))
    for space in spaces:
        made.callback(_undo, "ip", "netns", "del", space)  # first: Ctrl-C may come in between
        _do("ip", "netns", "add", space)
        _do("ip", "-n", space, "link", "set", "lo", "up")
    return spaces


def _make_cabled(made: contextlib.ExitStack, link: str) -> tuple[str, ...]:
    token = secrets.token_hex(_TOKEN_BYTES)
    cards = _cards(token, HOSTS)
    rate, burst = _RATES[link]
    spaces = _make_spaces(made, token, HOSTS)
    made.callback(_undo, "ip", "link", "del", cards[0])
    _do("ip", "link", "add", cards[0], "type", "veth", "peer", "name", cards[1])
    for host, (space, card) in enumerate(zip(spaces, cards, strict=True)):
        _plug(space, card, host)
        bucket = ["rate", f"{rate}bit", "burst", str(burst), "latency", f"{_QUEUE_MS}ms"]
        _do("tc", "-n", space, "qdisc", "add", "dev", _CARD, "root", "tbf", *bucket)
    return spaces


def _make_switched(made: contextlib.ExitStack, link: str, hosts: int) -> tuple[str, ...]:
    token = secrets.token_hex(_TOKEN_BYTES)
    rate_bits_s, round_trip_s = _DELAYS[link]
    rate_mbit_s = rate_bits_s / 1e6
    mtu = str(switch.packet_bytes(rate_mbit_s))
    spaces = _make_spaces(made, token, hosts)
    # Our copies are closed at once: with the switch's own go the cards, and processes that
    # talk over them fail instead of waiting.
    with contextlib.ExitStack() as opened:
        descriptors = {}
        for host, (space, card) in enumerate(zip(spaces, _cards(token, hosts), strict=True)):
            descriptors[_address(host)] = tunnel.open_device(card)
            opened.callback(os.close, descriptors[_address(host)])
            # No address of its own making: its announcements would count as sent.
            _plug(space, card, host, "mtu", mtu, "addrgenmode", "none")
        made.enter_context(tunnel.running(descriptors, rate_mbit_s, round_trip_s / 2))
    return spaces


def _cards(token: str, hosts: int) -> list[str]:
    return [f"shoe{token}{host}" for host in range(hosts)]


def _plug(space: str, card: str, host: int, *settings: str) -> None:
    _do("ip", "link", "set", card, "netns", space, "name", _CARD)
    if settings:
        _do("ip", "-n", space, "link", "set", _CARD, *settings)  # before it is up, and once it is there
    _do("ip", "-n", space, "addr", "add", f"{_address(host)}/24", "dev", _CARD)
    _do("ip", "-n", space, "link", "set", _CARD, "up")


def _address(host: int) -> str:
    return f"10.91.0.{host + 1}"


def _do(*command: str) -> str:
    try:
        ended = subprocess.run(command, check=True, capture_output=True, text=True, timeout=_TOOL_S)
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", None) or str(error)).strip()
        raise ShoestringError(f"`{' '.join(command)}` failed: {said}", hint=_HINT) from None
    return ended.stdout


def _undo(*command: str) -> None:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        subprocess.run(command, capture_output=True, timeout=_TOOL_S, check=False)
