"""Hosts to measure between. Here they are this machine, which all of them share.

`benchmarks/link` has hosts with a network of their own, behind the same interface.
"""

from dataclasses import dataclass

HOSTS = 2
LOOPBACK = "loopback"


@dataclass(frozen=True)
class Hosts:
    """Some hosts and the link between them."""

    link: str = LOOPBACK
    count: int = HOSTS

    @property
    def are_apart(self) -> bool:
        """Whether processes of these hosts reach each other over a network alone."""
        return False

    @property
    def rate_bits_s(self) -> int | None:
        """What each host can send at most; None: no limit but the machine."""
        return None

    @property
    def card(self) -> str:
        """The network card that leads to the other hosts."""
        return "lo"

    def command(self, host: int, *words: str) -> list[str]:
        """What to execute so that a command runs on a host."""
        return list(words)

    def address(self, host: int, seen_from: int) -> str:
        """The IP address by which one host reaches another, or itself."""
        return "127.0.0.1"
