"""What one shard computes, without sockets: the cost of an update, and of more workers.

The shard is the one that serves a run, driven by messages made here. Its answer to the
first round must have the bits that a plain loop gives before anything is timed. Times are
of one core, not of the clock: what else the machine does counts little.
"""

import contextlib
import gc
import hashlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.wire.load import RUN, SGD, Load, Said
from shoestring.bench.machine import Memcpy
from shoestring.bench.wire import replay
from shoestring.errors import ShoestringError
from shoestring.model.rules import Rule
from shoestring.server.shard import Shard
from shoestring.wire import messages as say


@dataclass(frozen=True)
class UpdateRow:
    """Decode, sum, update and encode on one core. Rates count the parameters' float32 bytes, once."""

    codec: str
    rule: str
    workers: int
    size_mb: float
    update_ms: float
    update_gbps: float
    memcpy_gbps: float
    over_memcpy: float


@dataclass(frozen=True)
class GrowthRow:
    """A round of one shard with so many workers, everything but sockets."""

    codec: str
    workers: int
    size_mb: float
    round_ms: float
    worker_ms: float  # a worker's part of it
    linear_ms: float  # on the line that fits all rows best
    over_linear: float


class Bench:
    """One shard in this process, under the load of some workers."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.shard = Shard(0, 1, RUN)
        self.seq = 0
        for said in load.entry():
            self._tell(said)
        self.shard.outbox.clear()

    def run_round(self) -> float:
        """Do one round; return the seconds that updates took."""
        self.seq += 1
        spent_s = 0.0
        for said in self.load.pushes(self.seq):
            self._tell(said)
        while (work := self.shard.next_work()) is not None:
            start = time.thread_time()
            work.run()
            spent_s += time.thread_time() - start
            self.shard.finish(work)
        answers = sum(isinstance(message, say.Full | say.Delta) for _, message, _ in self.shard.outbox)
        if answers != len(self.load.parts) * self.load.workers:
            raise ShoestringError("a shard did not answer every push", hint="please report this")
        self.shard.outbox.clear()
        return spent_s

    def digest(self) -> str:
        """The hash of all parameters."""
        digest = hashlib.sha256()
        for part in self.load.parts:
            digest.update(self.shard.parts[part.index].holding.params.data)
        return digest.hexdigest()

    def _tell(self, said: Said) -> None:
        worker, message, payload = said
        self.shard.handle(b"%d" % worker, message, payload, 0.0)


def measure_update(
    values: int, codec: str, rule: Rule, memcpy: Memcpy, repeats: int, workers: int = 2
) -> UpdateRow:
    """Time `Work.run` over all parts of a model."""
    bench = Bench(Load(values, rule, codec, workers))
    bench.run_round()
    if rule == SGD and bench.digest() != replay.digest(values, codec, workers, 1):
        raise ShoestringError(
            f"`{codec}` is not timed: the first update is not what a plain loop gives",
            hint="please report this",
        )
    copies, seconds = memcpy.sample(2), []
    with _collector_off():
        for _ in range(repeats):
            seconds.append(bench.run_round())
            copies += memcpy.sample()
    gbps, copy_gbps = 4e-9 * values / min(seconds), max(copies)
    return UpdateRow(
        codec, rule.kind, workers, 4e-6 * values, 1e3 * min(seconds), gbps, copy_gbps, gbps / copy_gbps
    )


def measure_growth(values: int, codec: str, counts: Sequence[int], repeats: int) -> list[GrowthRow]:
    """Time rounds with ever more workers, in turns, and compare with a straight line."""
    benches = [Bench(Load(values, SGD, codec, workers)) for workers in counts]
    for bench in benches:
        bench.run_round()
    seconds: list[list[float]] = [[] for _ in benches]
    with _collector_off():
        for _ in range(repeats):
            for bench, times in zip(benches, seconds, strict=True):
                start = time.thread_time()
                bench.run_round()
                times.append(time.thread_time() - start)
    best = np.array([min(times) for times in seconds])
    # Relative errors count alike: the largest number of workers does not decide alone.
    slope, start_s = np.polyfit(counts, best, 1, w=1 / best) if len(counts) > 1 else (best[0], 0.0)
    rows = []
    for workers, took_s in zip(counts, best.tolist(), strict=True):
        linear_s = float(start_s + slope * workers)
        rows.append(
            GrowthRow(
                codec,
                workers,
                4e-6 * values,
                1e3 * took_s,
                1e3 * took_s / workers,
                1e3 * linear_s,
                took_s / linear_s,
            )
        )
    return rows


@contextlib.contextmanager
def _collector_off() -> Iterator[None]:
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
