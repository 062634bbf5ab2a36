"""Reach a Ray cluster, and refuse one that anybody on the network could take over.

Whoever can connect to a Ray cluster can run code on it: that is what Ray is for. So one that
listens beyond its machine is used only if it turns away a client without its token, which
is tried out, or if the user says so. A cluster that is started here listens on loopback
alone and has a token of its own.

Nothing is reported to Ray's makers: usage statistics are off unless the user set them.
"""

import math
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from shoestring.errors import UsageError

AUTO, LOCAL = "auto", "local"

_PREFIX = "ray"
# Ray listens on all interfaces unless its node's address is one of these.
_OWN = ("127.0.0.1", "localhost", "::1", "[::1]")
_TOKEN = Path.home() / ".ray" / "auth_token"
_CONNECT_S = 10.0
_PROBE_S = 60.0
_LEAST_SHARE = 1000  # of a core: an actor asks for a thousandth at least
# A cluster of one machine shares its cores with the training: its processes do not come before
# those of the run, and count, look and report less often than a cluster of many nodes has to.
_QUIET = {
    "RAY_worker_niceness": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_raylet_report_resources_period_milliseconds": "1000",
}

# Says whether a client without a token is let in: prints `open` or `closed`; ends with an error if neither.
_PROBE = """
import sys
from ray.exceptions import AuthenticationError
from ray._raylet import GcsClient
try:
    GcsClient(address=sys.argv[1]).internal_kv_exists(b"shoestring", None, 10)
    print("open")
except AuthenticationError:
    print("closed")
"""


@dataclass(frozen=True)
class Node:
    """A machine of the cluster, as Ray counts it."""

    id: str
    address: str
    cpus: float
    gpus: float
    labels: Mapping[str, str] = field(default_factory=dict)


def parse_address(on: str) -> str:
    """Read what `--on` says: `ray`, `ray://auto`, `ray://local` or `ray://HOST:PORT`."""
    name, _, address = on.partition("://")
    host, _, port = address.rpartition(":")
    is_place = bool(host) and port.isdecimal() and 0 < int(port) < 65536
    if name != _PREFIX or (address not in ("", AUTO, LOCAL) and not is_place):
        raise UsageError(
            f"`--on {on}` names no place to run",
            hint="give `ray`, `ray://HOST:PORT` (the port of `ray start --head`), or `ray://local`",
        )
    return address or AUTO


def load_ray() -> Any:
    """Import Ray. Its types leave much open, so it comes as anything."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError:
        raise UsageError(
            "`--on ray` needs Ray, which is not installed", hint="run `pip install 'shoestring[ray]'`"
        ) from None
    return ray


class Cluster:
    """A connection to a Ray cluster, from `open_cluster`. Close it; what others started stays."""

    def __init__(self, ray: Any) -> None:
        self.ray = ray

    def nodes(self) -> list[Node]:
        """The nodes that are alive and have a core to give, in a fixed order."""
        found = []
        for row in self.ray.nodes():
            resources = row["Resources"]
            if row["Alive"] and resources.get("CPU", 0) > 0:
                labels = {str(name): str(value) for name, value in row.get("Labels", {}).items()}
                found.append(
                    Node(
                        row["NodeID"],
                        row["NodeManagerAddress"],
                        float(resources["CPU"]),
                        float(resources.get("GPU", 0)),
                        labels,
                    )
                )
        return sorted(found, key=lambda node: node.id)

    def close(self) -> None:
        """Disconnect; a cluster that was started for this run ends."""
        self.ray.shutdown()


def open_cluster(address: str, *, allow_open: bool = False, working_dir: str = "") -> Cluster:
    """Connect to a cluster, or with `local` start one on this machine alone.

    `working_dir` is copied to every node by Ray, and workers start in it.
    """
    if address == LOCAL:
        _keep_to_loopback()
        # Else any user of this machine could run code as this one.
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        for name, value in _QUIET.items():
            os.environ.setdefault(name, value)
    else:
        address = address if address != AUTO else _found_address()
        _use_token()
        if address.rpartition(":")[0] in _OWN:
            _keep_to_loopback()
        elif not allow_open:
            refuse_open(address)
    ray = load_ray()
    given: dict[str, Any] = {"address": address, "log_to_driver": False, "logging_level": "ERROR"}
    if address == LOCAL:
        given["include_dashboard"] = False
    if working_dir:
        given["runtime_env"] = {"working_dir": working_dir}
    try:
        ray.init(**given)
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise UsageError(
            f"the Ray cluster at `{address}` cannot be used: {reason}",
            hint="run this on one of its nodes, with the same versions of Python and Ray, and with its token "
            "where it has one (`RAY_AUTH_MODE=token`)",
        ) from None
    return Cluster(ray)


def refuse_open(address: str) -> None:
    """Raise unless the cluster at `address` turns away a client that has no token."""
    state = probe(address)
    if state == "unreachable":
        raise UsageError(
            f"no Ray cluster answers at `{address}`",
            hint="check the address: `ray start --head` prints it; the port is usually 6379",
        )
    if state != "closed":
        raise UsageError(
            f"the Ray cluster at `{address}` lets in everyone who reaches it, and with that runs their code",
            hint="start it with `RAY_AUTH_MODE=token` (see docs/cluster.md), or say `--allow-open-ray` "
            "where a firewall keeps others out",
        )


def probe(address: str) -> str:
    """Talk to a cluster without a token: `open`, `closed`, or `unreachable` if it does not say."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
    except OSError:
        return "unreachable"
    # In a process of its own, as Ray reads its settings once.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH_")}
    with suppress(subprocess.TimeoutExpired):
        asked = subprocess.run(
            [sys.executable, "-c", _PROBE, address],
            env={**environment, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"},
            capture_output=True,
            text=True,
            timeout=_PROBE_S,
            check=False,
        )
        return asked.stdout.strip() or "unreachable"
    return "unreachable"


def core_share(nodes: Sequence[Node], processes: int) -> float:
    """How much of a core each of a run's processes asks Ray for: one, or less so that all of them fit."""
    for parts in range(1, _LEAST_SHARE + 1):
        if sum(math.floor(node.cpus * parts) for node in nodes) >= processes:
            return math.floor(1e4 / parts) / 1e4
    cores = sum(node.cpus for node in nodes)
    raise UsageError(
        f"{processes} processes do not fit a Ray cluster of {len(nodes)} nodes with {cores:g} cores in all",
        hint="give fewer `--workers`, or add nodes",
    )


def _keep_to_loopback() -> None:
    # Ray replaces 127.0.0.1 by the machine's outward address, where a cluster on loopback does not listen.
    # This is its switch for machines that are to stay alone, read when Ray is imported.
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"


def _use_token() -> None:
    """Show the user's token where there is one and nothing else was said; Ray by itself would not."""
    if "RAY_AUTH_MODE" not in os.environ and (
        {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys() or _TOKEN.exists()
    ):
        os.environ["RAY_AUTH_MODE"] = "token"


def _found_address() -> str:
    """The address of the cluster that this machine is a node of."""
    given = os.environ.get("RAY_ADDRESS", "")
    if given and given != AUTO:
        return parse_address(f"{_PREFIX}://{given}")
    found = set()
    for process in psutil.process_iter(["name", "cmdline"]):
        if process.info["name"] == "raylet":
            words = [word.partition("=") for word in process.info["cmdline"] or ()]
            found |= {value for name, _, value in words if name in ("--gcs-address", "--gcs_address")}
    if len(found) != 1:
        several = ", ".join(sorted(found))
        raise UsageError(
            f"several Ray clusters run here: {several}" if found else "no Ray cluster runs here",
            hint="name one with `--on ray://HOST:PORT`, start one with `ray start`, or use `--on ray://local`",
        )
    return str(found.pop())
