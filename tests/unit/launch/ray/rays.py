"""A real Ray cluster of several nodes on this machine, on loopback alone, gone after the test.

Nodes are started by a process of their own, as Ray keeps settings for the life of a process. It obeys
lines on stdin: `add LABELS`, `kill NUMBER` (the node's raylet, by SIGKILL).
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.unit.launch.processes import Command, clean_environment, is_alive, wait_gone

LIMIT_S = 240.0

# Everything on loopback, nothing reported, and a lost node noticed soon.
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_failure_threshold": "3",
}

_SERVER = """
import json, os, sys
from ray.cluster_utils import Cluster

def start(head, labels):
    given = {"include_dashboard": False} if head else {}
    node = cluster.add_node(
        node_ip_address="127.0.0.1", num_cpus=2, object_store_memory=80 * 2**20, labels=labels, **given
    )
    nodes.append(node)
    print(json.dumps([cluster.address, node.node_id]), flush=True)

cluster, nodes = Cluster(), []
try:
    for line in sys.stdin:
        word, _, rest = line.strip().partition(" ")
        if word == "add":
            start(not nodes, json.loads(rest))
        elif word == "kill":
            os.kill(nodes[int(rest)].all_processes["raylet"][0].process.pid, 9)
            print("killed", flush=True)
finally:
    cluster.shutdown()
"""


class RayCommand(Command):
    """`shoestring ARGS...` with more time than usual: on a busy machine Ray needs it."""

    def __init__(self, nodes: "RayNodes", *args: str | Path, **environment: str) -> None:
        super().__init__(*args, **nodes.environment, **environment)
        self._overdue = threading.Timer(LIMIT_S, self.process.kill)

    def finish(self, number: signal.Signals | None = None) -> tuple[int, str, str]:
        if number is not None:
            self.process.send_signal(number)
        out, err = self.process.communicate(timeout=LIMIT_S)
        return self.process.returncode, out, err


class RayNodes:
    """The cluster's address, and its nodes' ids."""

    def __init__(self, folder: Path, **environment: str) -> None:
        self.folder = folder
        self.environment = {**ENVIRONMENT, "RAY_TMPDIR": str(folder), "TMPDIR": str(folder), **environment}
        self.ids: list[str] = []
        self.address = ""
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(folder / "stderr").open("wb"),
            text=True,
            env=clean_environment() | self.environment,
        )
        self._overdue = threading.Timer(LIMIT_S, self._process.kill)
        self._overdue.start()

    @property
    def on(self) -> str:
        return f"ray://{self.address}"

    def add(self, **labels: str) -> None:
        self.address, node = json.loads(self._tell(f"add {json.dumps(labels)}"))
        self.ids.append(node)

    def kill(self, number: int) -> None:
        """Kill a node's raylet by SIGKILL."""
        assert self._tell(f"kill {number}") == "killed\n"

    def close(self) -> list[psutil.Process]:
        """End it; return what is left of it all the same, ended now."""
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._overdue.cancel()
        self._process.stdout.close()
        left = wait_gone(processes_of(self.folder), 20)
        for process in left:
            process.kill()
        return left

    def _tell(self, line: str) -> str:
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, (self.folder / "stderr").read_text()
        return answer


@contextmanager
def ray_nodes(*labels: dict[str, str], **environment: str) -> Iterator[RayNodes]:
    """A cluster with a node for each of `labels`; nothing of it is left afterwards."""
    with short_folder() as folder:
        nodes = RayNodes(folder, **environment)
        try:
            for own in labels:
                nodes.add(**own)
            yield nodes
        finally:
            left = nodes.close()
        assert left == []


@contextmanager
def short_folder() -> Iterator[Path]:
    """A folder for Ray's sockets, whose paths must not be long."""
    folder = Path(tempfile.mkdtemp(prefix="rt-", dir="/tmp"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def processes_of(folder: Path) -> list[psutil.Process]:
    """All processes that were started with this folder as theirs."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get("RAY_TMPDIR") == str(folder):
                found.append(process)
        except psutil.Error:
            continue
    return [process for process in found if is_alive(process)]
