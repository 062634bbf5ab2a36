"""Real rounds of 2 to 16 workers on this machine, to calibrate the model of many by.

Each worker and each shard is a process, with sockets and keys as between hosts; every host
would carry one of both. All share this machine's cores. What a round costs is read from the
threads' processor time, how long it takes from the clock. Nothing counts that is not right:
all workers must end with the same bits, and small models with those of a plain loop.
"""

import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.scale.costs import Run, Usage
from shoestring.bench.link.hosts import Hosts
from shoestring.bench.link.peers import Peer, ask_all, started
from shoestring.bench.recipe import Progress
from shoestring.bench.wire import likeness
from shoestring.errors import ShoestringError
from shoestring.model.parts import Part, assign, cut
from shoestring.wire import keys

_WARMUP = 2
_LEAD_S = 0.03  # between the word and the start of a round: all have heard it by then
_PATIENCE = 3  # times as many rounds, while others disturb them
DISTURBED = 0.05  # so much of the machine's time may other processes take, not more
_TICK_S = 0.01
_REPLAYED = 1_000_000  # values: larger models are compared between workers alone


@dataclass(frozen=True)
class Effort:
    """What is measured: numbers of workers, sizes of models, and so many undisturbed rounds of each."""

    counts: tuple[int, ...] = (2, 4, 8, 16)
    sizes_mb: tuple[float, ...] = (
        8.0,
        40.0,
    )  # two sizes of parts, to tell the costs of messages from those of values
    rounds: int = 7


FULL = Effort()
QUICK = Effort(counts=(2, 4), sizes_mb=(4.0, 20.0), rounds=5)


def parts_of(size_mb: float) -> tuple[Part, ...]:
    """The parts that a model of this size is cut into."""
    return cut(likeness.shapes(int(size_mb * 1e6) // 4))


def measure(effort: Effort, codecs: Sequence[str], progress: Progress) -> list[Run]:
    """Start all processes, then measure one run after the other."""
    cases = [
        (codec, size_mb, count) for size_mb in effort.sizes_mb for codec in codecs for count in effort.counts
    ]
    runs: list[Run] = []
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shoestring-")))
        most = max(effort.counts)
        keys.new(keys.SHARD, folder)
        for index in range(most):
            keys.new(f"worker-{index}", folder)
        progress(f"starting {most} workers and {most} shards", 0, len(cases))
        shards, workers = (
            [stack.enter_context(_started(be, index, codecs)) for index in range(most)]
            for be in ("shard", "worker")
        )
        for peer in (*shards, *workers):
            peer.hear()
        for codec, size_mb, count in cases:
            progress(f"measuring {count} workers, `{codec}`, {size_mb:g} MB", len(runs), len(cases))
            hosts = (workers[:count], shards[:count])
            runs.append(_measure(*hosts, codec, size_mb, effort, folder, f"scale-{len(runs)}"))
    return runs


def _started(be: str, index: int, codecs: Sequence[str]) -> AbstractContextManager[Peer]:
    told = {"be": be, "codecs": list(codecs)}
    return started(Hosts(), index, f"{be} {index}", told, "benchmarks.scale.peer")


@contextlib.contextmanager
def _joined(
    workers: list[Peer], shards: list[Peer], codec: str, values: int, key_folder: Path, run: str
) -> Iterator[None]:
    told = {"shards": len(shards), "run": run, "keys": str(key_folder), "threads": _threads(len(shards))}
    for index, shard in enumerate(shards):
        shard.tell(do="serve", index=index, address="tcp://127.0.0.1:0", **told)
    addresses = [shard.hear()["address"] for shard in shards]
    told = {"workers": len(workers), "values": values, "codec": codec, "run": run}
    for index, worker in enumerate(workers):
        worker.tell(do="enter", worker=index, shards=addresses, keys=str(key_folder), **told)
    for worker in workers:
        worker.hear()
    yield
    ask_all(workers, do="leave", codec=codec)
    ask_all(shards, do="end")


@dataclass(frozen=True)
class Round:
    """One measured round."""

    seconds: float
    usage: Usage
    up: int  # bytes of the first worker
    down: int
    memory: int  # of the largest shard
    others: float  # the share of this machine's time that other processes took

    @property
    def is_disturbed(self) -> bool:
        return self.others > DISTURBED


def choose(rounds: Sequence[Round], wanted: int) -> list[Round]:
    """Take the rounds that nothing else disturbed; where they are too few, the fastest as well."""
    quiet = [one for one in rounds if not one.is_disturbed]
    rest = sorted((one for one in rounds if one.is_disturbed), key=lambda one: one.seconds)
    return quiet + rest[: max(0, (wanted + 1) // 2 - len(quiet))]


def _measure_rounds(workers: list[Peer], shards: list[Peer], codec: str, wanted: int) -> list[Round]:
    rounds: list[Round] = []
    while len(rounds) < _PATIENCE * wanted and sum(not one.is_disturbed for one in rounds) < wanted:
        rounds.append(_run_round(workers, shards, codec))
    return rounds


def _run_round(workers: list[Peer], shards: list[Peer], codec: str) -> Round:
    before = ask_all(workers, do="prepare", codec=codec)
    shards_before = ask_all(shards, do="usage")
    began, busy_s = time.monotonic(), _busy_s()
    at = began + _LEAD_S
    after = ask_all(workers, do="round", codec=codec, at=at)
    shards_after = ask_all(shards, do="usage")
    elapsed_s, busy_s = time.monotonic() - began, _busy_s() - busy_s
    spent, shard_spent = _spent(before, after), _spent(shards_before, shards_after)
    usage = Usage(
        exchange=spent.get("exchange", 0.0),
        training=spent.get("MainThread", 0.0),
        worker_io=spent.get("io", 0.0),
        service=shard_spent.get("service", 0.0),
        update=shard_spent.get("update", 0.0),
        shard_io=shard_spent.get("io", 0.0),
    )
    seconds = max(answer["ended"] for answer in after) - at
    memory = max(answer["memory"] for answer in shards_after)
    # The kernel counts the machine's time in ticks, for each core: what is less cannot be told.
    others_s = busy_s - sum(spent.values()) - sum(shard_spent.values()) - _TICK_S * _cores()
    others = max(0.0, others_s) / (_cores() * elapsed_s)
    return Round(seconds, usage, after[0]["up"], after[0]["down"], memory, others)


def _measure(
    workers: list[Peer],
    shards: list[Peer],
    codec: str,
    size_mb: float,
    effort: Effort,
    key_folder: Path,
    run: str,
) -> Run:
    parts = parts_of(size_mb)
    values = sum(part.size for part in parts)
    counted: list[Round] = []
    with _joined(workers, shards, codec, values, key_folder, run):
        for _ in range(_WARMUP):
            _run_round(workers, shards, codec)
        rounds = _measure_rounds(workers, shards, codec, effort.rounds)
        _check(workers, codec, values, _WARMUP + len(rounds))
    counted = choose(rounds, effort.rounds)
    total = counted[0].usage
    for one in counted[1:]:
        total = total.plus(one.usage)
    count = len(counted)
    return Run(
        codec=codec,
        workers=len(workers),
        parts=tuple(part.size for part in parts),
        homes=assign(parts, len(shards)),
        round_s=statistics.median(one.seconds for one in counted),
        fastest_s=min(one.seconds for one in counted),
        rounds=count,
        usage=total.times(1 / count),
        up_bytes=sum(one.up for one in counted) // count,
        down_bytes=sum(one.down for one in counted) // count,
        memory_bytes=max(one.memory for one in counted),
        size_mb=size_mb,
        others=sum(one.others for one in counted) / count,
        cores=_cores(),
        threads=_threads(len(shards)),
    )


def _busy_s() -> float:
    """The seconds that this machine's cores have worked, or been taken away, so far."""
    times = psutil.cpu_times()
    return float(sum(times[:9]) - times.idle - times.iowait - times.guest)


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _threads(shards: int) -> int:
    return max(1, _cores() // shards)


def _spent(before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]]) -> dict[str, float]:
    """What threads of the same name took, in all processes together."""
    found: dict[str, float] = {}
    for old, new in zip(before, after, strict=True):
        for name, spent_s in new["seconds"].items():
            found[name] = found.get(name, 0.0) + spent_s - old["seconds"].get(name, 0.0)
    return found


def _check(workers: list[Peer], codec: str, values: int, rounds: int) -> None:
    is_replayed = values <= _REPLAYED
    for index, worker in enumerate(workers):
        worker.tell(do="digest", codec=codec, replay=is_replayed and index == 0)
    found = [worker.hear() for worker in workers]
    wanted = found[0].get("wanted", found[0]["found"])
    if {answer["found"] for answer in found} != {wanted} or found[0]["rounds"] != rounds:
        raise ShoestringError(
            f"`{codec}` is not timed: after {rounds} rounds of {len(workers)} workers "
            "the parameters are not what they must be",
            hint="please report this",
        )
