"""Who takes part, with which settings, and with which learning rate.

Learning rates were searched over the same grid for all (`python -m benchmarks.train --search`);
what came out is below.
"""

import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoestring.errors import UsageError

PEERS_VARIABLE = "SHOESTRING_PEERS"  # the Python that has torchft and hivemind
_PEERS = Path(".venv-peers/bin/python")
_MODULES = "benchmarks.train.entrants"
_ASK_S = 60.0


@dataclass(frozen=True)
class Contestant:
    """A way to train on several hosts."""

    name: str
    module: str  # within `benchmarks.train.entrants`
    options: dict[str, Any] = field(default_factory=dict)
    package: str = "torch"  # that must be there
    period: int = 1  # steps from one exchange to the next
    is_exact: bool = False  # whether replicas hold the same bits after an exchange
    follows_link: bool = False  # whether what it computes depends on the link
    is_whole: bool = (
        False  # whether every step is taken on every link: what it sends differs from step to step
    )

    @property
    def module_name(self) -> str:
        return f"{_MODULES}.{self.module}"


def _ours(name: str, codec: str, policy: str, *, period: int = 1, follows_link: bool = False) -> Contestant:
    options = {"codec": codec, "policy": policy}
    return Contestant(
        name, "ours", options, period=period, is_exact=True, follows_link=follows_link, is_whole=True
    )


CONTESTANTS = {
    one.name: one
    for one in (
        Contestant("ddp", "ddp"),
        Contestant("ddp-fp16", "ddp", {"hook": "fp16"}),
        Contestant("powersgd-1", "ddp", {"hook": "powersgd", "rank": 1}),
        Contestant("powersgd-2", "ddp", {"hook": "powersgd", "rank": 2}),
        Contestant("powersgd-4", "ddp", {"hook": "powersgd", "rank": 4}),
        Contestant("torchft-diloco", "torchft", {"kind": "diloco", "sync_every": 20}, "torchft-nightly", 20),
        Contestant("torchft-local", "torchft", {"kind": "local", "sync_every": 20}, "torchft-nightly", 20),
        Contestant(
            "hivemind",
            "hivemind",
            {"sync_every": 20},
            "hivemind",
            20,
            follows_link=True,  # not the link, but no two runs are the same
            is_whole=True,
        ),
        _ours("shoestring-auto", "auto", "every", follows_link=True),
        _ours("shoestring", "auto", "auto", follows_link=True),
        _ours("shoestring-every", "dct:step=1.5", "every"),
        _ours("shoestring-delay", "dct:step=1.5", "every:delay=1"),
        _ours("shoestring-local", "dct", "local:4", period=4),
        _ours("shoestring-local-8", "dct", "local:8", period=8),
    )
}


def find_contestant(name: str) -> Contestant:
    try:
        return CONTESTANTS[name]
    except KeyError:
        raise UsageError(
            f"there is no contestant `{name}`", hint=f"one of {', '.join(CONTESTANTS)}"
        ) from None


def find_python(contestant: Contestant) -> str:
    """The Python that can run a contestant: this one, or that of `make peers`."""
    return _ask(contestant)[0]


def find_version(contestant: Contestant) -> str:
    """The version of the package a contestant needs."""
    return _ask(contestant)[1]


def _ask(contestant: Contestant) -> tuple[str, str]:
    for python in (sys.executable, os.environ.get(PEERS_VARIABLE) or str(_PEERS.absolute())):
        question = [python, "-c", "import importlib.metadata as m, sys; print(m.version(sys.argv[1]))"]
        with suppress(OSError, subprocess.SubprocessError):
            found = subprocess.run(
                [*question, contestant.package], check=True, capture_output=True, text=True, timeout=_ASK_S
            )
            return python, found.stdout.strip()
    raise UsageError(
        f"`{contestant.package}` is not installed, which `{contestant.name}` needs",
        hint=f"`make peers`, or set `{PEERS_VARIABLE}` to a Python that has it",
    )
