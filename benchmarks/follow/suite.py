"""A run with steps by a timer, and a follower that comes and goes: how long are steps with it and without?

Workers' steps take so long by a timer that cores are idle; a control group of the kernel gives the follower
a share of a core (that takes root). The follower reads every round for some seconds and is away as long.
Neighbouring times with and without it are compared, so that what else the machine does meets both.

Figures count only if the follower has had every round while it was there, with the run's own bits.
"""

import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from shoestring.config import Run
from shoestring.errors import FleetError, ShoestringError
from shoestring.fleet.engine.quota import Quota
from shoestring.launch.local import run_local
from shoestring.observe.events import Tail

PASSED_OVER_S = 0.5  # on both sides of a change, which is in neither time


@dataclass(frozen=True)
class Row:
    """What one run found."""

    policy: str
    codec: str
    step_ms: float  # without the follower
    followed_step_ms: float
    change: float  # the median over neighbouring times, as a share
    visits: int
    rounds: int  # that the follower has read
    missed: list[int]  # rounds between others, at each visit
    other_bits: int
    cpu_ms: float  # of the follower, a round


def measure(
    folder: Path, *, policy: str, codec: str, seconds: float, visit_s: float, timer_ms: float, values: int,
    cpus: float, workers: int, say: Callable[[str], None],
) -> Row:  # fmt: skip
    """Train for about so many seconds, with a follower that comes for `visit_s` and goes."""
    folder.mkdir(parents=True)
    steps = int(seconds / (timer_ms / 1e3))
    settings = Run(name="followed", workers=workers, folder=folder / "run", codec=codec, policy=policy)
    command = ["-m", "benchmarks.follow.training", *map(str, (folder, steps, timer_ms, values))]
    quota = _quota(cpus, say)
    reading = threading.Thread(target=_read, args=(folder, visit_s, quota))
    reading.start()
    try:
        outcome = run_local(command, settings, shards=1, threads=1)
        reading.join()
    finally:
        if quota is not None:
            quota.close()
    if outcome.failure is not None:
        raise ShoestringError(
            f"{outcome.failure.who} failed with exit code {outcome.failure.code}",
            hint=" ".join(outcome.failure.last_lines) or "see above",
        )
    worker = json.loads((folder / "worker-0.json").read_text())
    return _row(policy, codec, worker, json.loads((folder / "follower.json").read_text()))


def _quota(cpus: float, say: Callable[[str], None]) -> Quota | None:
    try:
        return Quota("follower", cpus)
    except FleetError as error:
        say(f"the follower has no share of its own: {error.message}")
        return None


def _read(folder: Path, visit_s: float, quota: Quota | None) -> None:
    """Start the follower once the first step is done, and wait for it."""
    tail = Tail(folder / "run")
    limit = time.monotonic() + 300.0
    while time.monotonic() < limit and not any(event.get("event") == "step" for event in tail.poll()):
        time.sleep(0.05)
    command = [
        sys.executable,
        "-m",
        "benchmarks.follow.reader",
        str(folder),
        str(folder / "run"),
        str(visit_s),
    ]
    if quota is not None:
        command.append(str(quota.folder))
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"})


def _row(policy: str, codec: str, worker: dict[str, Any], visits: list[dict[str, Any]]) -> Row:
    known = {int(seq): digest for seq, digest in worker["hashes"].items()}
    found = [{int(seq): digest for seq, digest in visit["hashes"].items()} for visit in visits]
    wrong = sum(known.get(seq) != digest for one in found for seq, digest in one.items())
    missed = [max(one) - min(one) + 1 - len(one) for one in found]
    steps = [(after, 1e3 * (after - before)) for before, after in pairwise(worker["ended"])]

    def median(began: float, ended: float) -> float:
        inside = [ms for at, ms in steps if began + PASSED_OVER_S < at < ended - PASSED_OVER_S]
        return float(statistics.median(inside))

    changes, with_it, without = [], [], []
    for here, after in pairwise(visits):  # a visit, and the time until the next
        with_it.append(median(here["began"], here["ended"]))
        without.append(median(here["ended"], after["began"]))
        changes.append(with_it[-1] / without[-1] - 1)
    rounds = sum(map(len, found))
    return Row(
        policy=policy,
        codec=codec,
        step_ms=statistics.median(without),
        followed_step_ms=statistics.median(with_it),
        change=statistics.median(changes),
        visits=len(visits),
        rounds=rounds,
        missed=missed,
        other_bits=wrong,
        cpu_ms=1e3 * sum(visit["cpu_s"] for visit in visits) / rounds,
    )
