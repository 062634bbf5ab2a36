"""Run one contestant on its hosts, and check what comes out."""

import contextlib
import os
import secrets
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import msgspec

from benchmarks.train.contestants import Contestant, find_python
from benchmarks.train.entrants.ours import KEYS
from benchmarks.train.trainer import Result, Task
from benchmarks.train.workloads import Workload
from shoestring.bench.link.hosts import Hosts
from shoestring.errors import ShoestringError
from shoestring.wire import keys

_LEAVE_S = 15.0
_PORTS = 64
_START_S = 180.0
_APART = 1e-3
_TAIL = 2000  # characters of what a trainer said last


@dataclass(frozen=True)
class Entry:
    """A contestant's start in a race."""

    contestant: Contestant
    workload: Workload
    seed: int
    rate: float
    steps: int
    data: Path | None = None


def race(entry: Entry, hosts: Hosts, count: int, limit_s: float) -> list[Result]:
    """Train on `count` hosts; return how it went on each.

    Every loss must be a number, and after an exchange replicas must hold the same parameters: ours
    the same bits, others' but for a small part; otherwise there is no result.
    """
    python = find_python(entry.contestant)
    with tempfile.TemporaryDirectory(prefix="shoestring-race-") as place:
        folder = Path(place)
        _write_keys(folder / KEYS, count)
        task = Task(
            module=entry.contestant.module_name,
            options=entry.contestant.options,
            workload=entry.workload.name,
            seed=entry.seed,
            rate=entry.rate,
            steps=entry.steps,
            schedule=entry.workload.steps,
            hosts=count,
            addresses=[hosts.address(host, -1) for host in range(count)],
            card=hosts.card,
            port=20_000 + _PORTS * secrets.randbelow(150),
            folder=place,
            data=str(entry.data) if entry.data else None,
        )
        told = folder / "task.json"
        told.write_bytes(msgspec.json.encode(task))
        words = [python, "-m", "benchmarks.train.trainer", str(told)]
        with _running([hosts.command(host, *words, str(host)) for host in range(count)]) as trainers:
            for host, (process, said) in enumerate(trainers):
                _wait(process, said, limit_s + _START_S, f"`{entry.contestant.name}` on host {host}")
        results = [
            msgspec.json.decode((folder / f"host-{host}.json").read_bytes(), type=Result)
            for host in range(count)
        ]
    check(entry, results)
    return results


def are_equal(results: Sequence[Result]) -> bool:
    """Whether all replicas hold the same bits."""
    return len({result.digest for result in results}) == 1


def check(entry: Entry, results: list[Result]) -> None:
    name = entry.contestant.name
    for result in results:
        if len(result.losses) != entry.steps or None in (*result.losses, result.energy):
            raise ShoestringError(f"`{name}` did not train: its losses are no numbers", hint="lower its rate")
    if entry.steps % entry.contestant.period:
        return
    energies = [result.energy or 0.0 for result in results]
    is_close = max(energies) - min(energies) <= _APART * max(energies)
    if not is_close or (entry.contestant.is_exact and not are_equal(results)):
        raise ShoestringError(f"the replicas of `{name}` ended with different parameters", hint="look at it")


def _write_keys(folder: Path, count: int) -> None:
    for name in ("shard", *(f"worker-{worker}" for worker in range(count))):
        keys.new(name, folder)


@contextlib.contextmanager
def _running(commands: list[list[str]]) -> Iterator[Sequence[tuple["subprocess.Popen[bytes]", IO[bytes]]]]:
    """Start the trainers; none of them, nor what they started, outlives the context."""
    environment = {
        **os.environ,
        "OMP_WAIT_POLICY": "PASSIVE",
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    with contextlib.ExitStack() as stack:
        trainers = []
        for command in commands:
            said = stack.enter_context(tempfile.TemporaryFile())
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=said, stderr=said,
                env=environment, start_new_session=True,
            )  # fmt: skip
            stack.callback(_end, process)
            trainers.append((process, said))
        yield trainers


def _end(process: "subprocess.Popen[bytes]") -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_LEAVE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _wait(process: "subprocess.Popen[bytes]", said: IO[bytes], timeout_s: float, who: str) -> None:
    try:
        code = process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        raise ShoestringError(f"{who} took longer than {timeout_s:g} s", hint="give it fewer steps") from None
    if code != 0:
        said.seek(0)
        tail = said.read().decode(errors="replace").strip()[-_TAIL:]
        raise ShoestringError(f"{who} failed with exit code {code}", hint=tail or "it said nothing")
