"""Hosts to measure between: this machine's loopback, or network namespaces with a slow link.

Each namespace is a host of its own with a loopback and one network card; the cards are
the two ends of a virtual cable, and the kernel's token bucket (`tbf`) holds what each end
sends to the rate. That needs root and iproute2. Names are unique, and everything is
removed at the end, also after a failure: with a namespace goes its end of the cable.
"""

import contextlib
import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

from shoestring.errors import ShoestringError

HOSTS = 2
LOOPBACK = "loopback"
# Bits a second, and what may leave at once: 2 ms of it, at least a few packets.
_RATES = {"1gbit": (1_000_000_000, 256_000), "100mbit": (100_000_000, 32_000)}
LINKS = (LOOPBACK, *_RATES)
_QUEUE_MS = 50
_CARD = "cable"
_TOOL_S = 20.0


@dataclass(frozen=True)
class Hosts:
    """Two hosts and the link between them. `spaces` are empty where both are this machine."""

    link: str
    spaces: tuple[str, ...] = ()

    @property
    def rate_bits_s(self) -> int | None:
        """What each host can send at most; None: no limit but the machine."""
        return _RATES[self.link][0] if self.spaces else None

    def command(self, host: int, *words: str) -> list[str]:
        """What to execute so that a command runs on a host."""
        return ["ip", "netns", "exec", self.spaces[host], *words] if self.spaces else list(words)

    def address(self, host: int, seen_from: int) -> str:
        """The IP address by which one host reaches the other, or itself."""
        return _address(host) if self.spaces and host != seen_from else "127.0.0.1"

    @property
    def card(self) -> str:
        """The network card that leads to the other host."""
        return _CARD if self.spaces else "lo"


def missing(link: str) -> str:
    """Say why a link cannot be had here; empty if it can."""
    if link not in _RATES:
        return ""
    tools = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if tools:
        return f"`{tools[0]}` is not installed"
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        with connected(link):
            return ""
    except ShoestringError as error:
        return error.message


@contextlib.contextmanager
def connected(link: str) -> Iterator[Hosts]:
    """Give two hosts joined by a link; take them away again at the end."""
    if link not in _RATES:
        yield Hosts(LOOPBACK)
        return
    token = secrets.token_hex(3)
    spaces = tuple(f"shoestring-{token}-{host}" for host in range(HOSTS))
    cards = [f"shoe{token}{host}" for host in range(HOSTS)]  # 15 characters are the most
    rate, burst = _RATES[link]
    with contextlib.ExitStack() as made:
        for space in spaces:
            _do("ip", "netns", "add", space)
            made.callback(_undo, "ip", "netns", "del", space)
        made.callback(_undo, "ip", "link", "del", cards[0])
        _do("ip", "link", "add", cards[0], "type", "veth", "peer", "name", cards[1])
        for host, (space, card) in enumerate(zip(spaces, cards, strict=True)):
            _do("ip", "link", "set", card, "netns", space, "name", _CARD)
            _do("ip", "-n", space, "addr", "add", f"{_address(host)}/24", "dev", _CARD)
            _do("ip", "-n", space, "link", "set", "lo", "up")
            _do("ip", "-n", space, "link", "set", _CARD, "up")
            bucket = ["rate", f"{rate}bit", "burst", str(burst), "latency", f"{_QUEUE_MS}ms"]
            _do("tc", "-n", space, "qdisc", "add", "dev", _CARD, "root", "tbf", *bucket)
        yield Hosts(link, spaces)


def _address(host: int) -> str:
    return f"10.91.0.{host + 1}"


def _do(*command: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_TOOL_S)
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", None) or str(error)).strip()
        raise ShoestringError(
            f"`{' '.join(command)}` failed: {said}",
            hint="run as root with iproute2, or measure `--link loopback` alone",
        ) from None


def _undo(*command: str) -> None:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        subprocess.run(command, capture_output=True, timeout=_TOOL_S, check=False)
