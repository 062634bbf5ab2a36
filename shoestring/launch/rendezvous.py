"""Meet the other workers of a run that torchrun or Slurm has started, and start the shards.

Every host's first worker starts that host's shard; where the shards listen goes through a
store that torch provides. It carries addresses and a path, as text. Whoever reaches the
store's port may write there, so between hosts nothing in it is trusted: a worker talks to
a shard that holds the run's key, wherever the store says it is.

On one host the shards are reached by this user alone and need no keys. On several hosts
there are always keys: without a folder of them nothing is started.
"""

import ipaddress
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed
from torch.distributed.distributed_c10d import PrefixStore, Store

from shoestring.checkpoint.resume import AUTO, begin
from shoestring.config import Run
from shoestring.errors import JoinError, ShoestringError, UsageError
from shoestring.launch.notice import say
from shoestring.launch.shard import ShardArguments, local_address
from shoestring.launch.supervisor import Supervisor
from shoestring.worker import session

_dist: Any = torch.distributed  # its types leave out some of its public names
HOST_VARIABLE = "SHOESTRING_HOST"  # where other hosts reach this one, if it cannot be told

_FAILED = "failed: "
_OUTWARDS = ("192.0.2.1", "2001:db8::1")  # reserved for documentation: any address beyond the router


@dataclass(frozen=True)
class Place:
    """Where a launcher has put this process, and where it meets the others."""

    name: str  # of the run
    worker: int
    workers: int
    local: int  # which of its host's workers; 0 starts the shard
    host: int
    hosts: int
    store_host: str
    store_port: int
    hosts_store: bool  # whether this process has to provide the store
    attempt: int = 0  # how often the whole run was started again: each time it meets anew


def meet(place: Place, settings: Run) -> Run:
    """Take part in the run: wait until all shards listen, and begin this process's session."""
    keys = settings.keys
    if place.hosts > 1 and keys is None:
        raise UsageError(
            f"a run on {place.hosts} hosts needs keys, and `SHOESTRING_KEYS` is not set",
            hint="write them with `shoestring keys new shard` and `shoestring keys new worker-0`, ..., "
            "and set `SHOESTRING_KEYS` to their folder on every host",
        )
    run = replace(
        settings,
        name=place.name,
        worker=place.worker,
        workers=place.workers,
        local=place.local,
        incarnation=place.attempt + 1,
        keys=keys.absolute() if place.hosts > 1 and keys is not None else None,
    )
    try:
        store = _open_store(place, settings.meet_timeout_s)
        shard: _HostShard | None = None
        if place.worker == 0:
            store.set("resume", _tell(lambda: str(_choose(settings) or "")))
        resume = _hear(store, "resume")
        run = replace(run, resume=Path(resume) if resume else None)
        if place.local == 0:
            shard = _HostShard(place, run)
            store.set(f"shard/{place.host}", _tell(shard.start))
        run = replace(run, shards=tuple(_hear(store, f"shard/{host}") for host in range(place.hosts)))
        _part(store, place)
    except _dist.DistError as error:
        raise JoinError(
            f"worker {place.worker} of {place.workers} could not meet the others at "
            f"{place.store_host}:{place.store_port} within {settings.meet_timeout_s:g} s: {error}",
            hint="check that all workers were started, by `srun` or torchrun, and that they reach this host; "
            "`SHOESTRING_MEET_TIMEOUT_S` lets them take longer",
        ) from None
    here = session.begin(run)
    if shard is not None:
        here.closers.append(shard.finish)
    return run


def _open_store(place: Place, timeout_s: float) -> Store:
    store = _dist.TCPStore(
        place.store_host,
        place.store_port,
        is_master=place.hosts_store,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
    )
    return PrefixStore(f"shoestring/{place.attempt}", store)


def _part(store: Store, place: Place) -> None:
    """Leave the store; whoever provides it goes last, so that the port is free afterwards."""
    count = store.add("done", 1)
    if count == place.workers:
        store.set("all-done", "")
    if place.hosts_store:
        store.wait(["all-done"])


def _choose(settings: Run) -> Path | None:
    return begin(str(settings.resume or AUTO), settings.checkpoint, say)


def _tell(act: Callable[[], str]) -> str:
    """Do something whose result the others wait for: they must hear of a failure too."""
    try:
        return act()
    except ShoestringError as error:
        return f"{_FAILED}{error.message}\n{error.hint}"


def _hear(store: Store, key: str) -> str:
    text = str(store.get(key), errors="replace")
    if text.startswith(_FAILED):
        message, _, hint = text.removeprefix(_FAILED).partition("\n")
        raise JoinError(message, hint=hint)
    return text


class _HostShard:
    """This host's shard, a child of this process."""

    def __init__(self, place: Place, run: Run) -> None:
        self._place = place
        self._run = run
        self._supervisor = Supervisor()
        self._folder = ""

    def start(self) -> str:
        """Start it and return its address."""
        place = self._place
        if place.hosts > 1:
            address = f"tcp://{own_address(place.store_host)}:0"
        else:
            self._folder = tempfile.mkdtemp(prefix="shoestring-")
            address = local_address(Path(self._folder), place.host)
        threads = max(1, len(os.sched_getaffinity(0)) // 4)
        arguments = ShardArguments(place.host, place.hosts, self._run, address, threads, linger=True)
        try:
            return self._supervisor.start_shard(arguments).wait_ready(self._run.ready_timeout_s)
        except ShoestringError:
            self._clean_up()
            raise

    def finish(self) -> None:
        """Let the shard go once no worker needs it; after a crash of this one, do not wait for that."""
        self._supervisor.let_go()
        if hasattr(sys, "last_value"):
            return
        for child in self._supervisor.children:
            child.ended.wait()
        self._clean_up()

    def _clean_up(self) -> None:
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)


def own_address(towards: str) -> str:
    """The address by which other hosts reach this one, found by the way to one of them."""
    given = os.environ.get(HOST_VARIABLE)
    if given:
        return given
    # A host's own name often means its loopback: then take the way out. Nothing is sent.
    for target in (towards, *_OUTWARDS):
        with suppress(OSError):
            family, _, _, _, where = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(where)
                found = ipaddress.ip_address(probe.getsockname()[0].partition("%")[0])
            if not found.is_loopback and not found.is_unspecified:
                return f"[{found}]" if found.version == 6 else str(found)
    raise UsageError(
        f"this host has no address that others reach it by, looking towards `{towards}`",
        hint=f"set `{HOST_VARIABLE}` to this host's IP address",
    )
