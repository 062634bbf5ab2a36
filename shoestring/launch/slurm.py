"""Take part in a run whose workers `srun` has started, one shard a node."""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping

from shoestring.config import Run
from shoestring.errors import UsageError
from shoestring.launch.rendezvous import Place, meet

_FIRST_PORT, _PORTS = 20_000, 12_000  # below those the kernel hands out
_MOST_NODES = 100_000
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
_HOSTS = re.compile(r"[^,\[\]]*(?:\[[^\[\]]*\][^,\[\]]*)*")


def join(settings: Run) -> Run:
    """Meet the other tasks on the first node."""
    return meet(place(os.environ), settings)


def place(environment: Mapping[str, str]) -> Place:
    """Read what Slurm tells a task."""
    try:
        job, step = environment["SLURM_JOB_ID"], environment.get("SLURM_STEP_ID", "0")
        nodes = environment.get("SLURM_STEP_NODELIST") or environment["SLURM_JOB_NODELIST"]
        hosts = int(environment.get("SLURM_STEP_NUM_NODES") or environment.get("SLURM_NNODES", "1"))
        worker = int(environment["SLURM_PROCID"])
        return Place(
            name=environment.get("SHOESTRING_RUN") or f"slurm-{job}.{step}",
            worker=worker,
            workers=int(environment["SLURM_NTASKS"]),
            local=int(environment["SLURM_LOCALID"]),
            host=int(environment["SLURM_NODEID"]),
            hosts=hosts,
            store_host="127.0.0.1" if hosts == 1 else host_names(nodes)[0],
            store_port=_FIRST_PORT + (7 * int(job) + int(step)) % _PORTS,
            hosts_store=worker == 0,
            attempt=int(environment.get("SLURM_RESTART_COUNT", "0")),
        )
    except (KeyError, ValueError) as error:
        raise UsageError(
            f"the environment looks like Slurm's, but a variable is missing or no number: {error}",
            hint="start the script with `srun`, or alone with `env -u SLURM_PROCID`",
        ) from None


def host_names(nodes: str) -> list[str]:
    """Write out a list such as `a[1-3,7],b2`, by Slurm itself where it can be asked."""
    if shutil.which("scontrol"):
        command = ["scontrol", "show", "hostnames", nodes]
        asked = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        if asked.returncode == 0 and asked.stdout.split():
            return asked.stdout.split()
    return expand(nodes)


def expand(nodes: str) -> list[str]:
    """Write out a list of hosts in Slurm's syntax, in its order."""
    names: list[str] = []
    rest = nodes.strip()
    while rest:
        match = _HOSTS.match(rest)
        pattern = match[0] if match else ""
        names += _expand_one(pattern, nodes)
        rest = rest[len(pattern) :]
        if rest and (rest[0] != "," or not pattern):
            raise _unreadable(nodes)
        rest = rest[1:]
    if not names:
        raise _unreadable(nodes)
    return names


def _expand_one(pattern: str, nodes: str) -> list[str]:
    head, bracket, tail = pattern.partition("[")
    if not bracket:
        return [pattern]
    inside, _, tail = tail.partition("]")
    numbers: list[str] = []
    for piece in inside.split(","):
        bounds = _RANGE.fullmatch(piece)
        if bounds is None:
            raise _unreadable(nodes)
        low, high = bounds[1], bounds[2] or bounds[1]
        if int(high) - int(low) >= _MOST_NODES:
            raise _unreadable(nodes)
        numbers += [str(number).zfill(len(low)) for number in range(int(low), int(high) + 1)]
    return [head + number + end for number in numbers for end in _expand_one(tail, nodes)]


def _unreadable(nodes: str) -> UsageError:
    return UsageError(
        f"`{nodes}` is no list of hosts that can be read",
        hint="it comes from `SLURM_JOB_NODELIST`; `scontrol show hostnames` tells what Slurm makes of it",
    )
