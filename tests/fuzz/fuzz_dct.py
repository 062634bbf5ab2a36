"""Fuzz the decoder of the codec `dct`.

    python tests/fuzz/fuzz_dct.py --streams 10000000 --seed 1 --processes 2

Every stream is a mutation of a good one. The decoder must answer with finite values or
`StreamError`; where it was adding, an error leaves `out` as it was. Now and then the
NumPy backend decodes the same stream and must give the same bits, or refuse it too.

Streams come in batches, each drawn from (seed, number of the batch) alone, so a finding
is repeated with `--seed S --first-batch B --streams 1000`. Each process is watched from
outside: one that dies is a crash, one that stands still a hang, and either is replaced.

Progress goes to stderr, a summary as JSON to stdout; the exit status is 1 after a finding.
"""

import argparse
import json
import multiprocessing
import sys
import time
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from random import Random

import numpy as np
import psutil

from shoestring.codec.dct.codec import Dct
from shoestring.errors import StreamError
from tests.fuzz.dct_streams import LARGE, LAYOUTS, MUTATIONS, Seed, seeds
from tests.fuzz.summary import Summary as Common

BATCH = 1000
COMPARE_EVERY = 200
LARGE_SHARE = 0.01
HANG_S = 60.0


@dataclass
class Summary(Common):
    """What the decoder did with the streams. `broken_promises`: `out` changed on an error, values
    that are not finite, backends that differ. Crashes and hangs must stay 0 too."""

    streams: int = 0
    crashes: int = 0
    hangs: int = 0

    @property
    def bad(self) -> int:
        return super().bad + self.crashes + self.hangs

    def add(self, other: "Summary") -> None:
        for name in ("streams", "errors", "decoded", "foreign_exceptions", "broken_promises"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.memory_growth_mb = max(self.memory_growth_mb, other.memory_growth_mb)
        self.slowest_s = max(self.slowest_s, other.slowest_s)
        self.findings += other.findings


class Fuzzer:
    """Decodes batches of spoilt streams in this process."""

    def __init__(self, seed: int, compare_every: int = COMPARE_EVERY) -> None:
        self._seed = seed
        self._compare_every = compare_every
        self._numba, self._numpy = Dct(), Dct(backend="numpy")
        own = seeds()
        self._alike: list[list[Seed]] = [[s for s in own if s.layout == k] for k in range(len(LAYOUTS))]
        self._small = [s for s in own if s.layout != LARGE]
        rng = np.random.default_rng(0)
        self._before = [rng.standard_normal(layout.total).astype(np.float32) for layout in LAYOUTS]
        self._out = [before.copy() for before in self._before]
        self._bits = [out.view(np.uint32) for out in self._out]
        self._before_bits = [before.view(np.uint32).copy() for before in self._before]
        self._memory = 0

    def run(self, batch: int, streams: int = BATCH) -> Summary:
        """Run the first `streams` of one batch."""
        summary = Summary()
        rng = Random(f"{self._seed}/{batch}")
        for number in range(streams):
            seed = rng.choice(self._alike[LARGE] if rng.random() < LARGE_SHARE else self._small)
            mutation = rng.choice(MUTATIONS)
            payload = bytes(mutation(seed, self._alike[seed.layout], rng))
            weight = None if rng.random() < 0.2 else 0.5
            found = self._try(payload, seed.layout, weight, number % self._compare_every == 0, summary)
            if found:
                where = f"seed {self._seed} batch {batch} stream {number} {mutation.__name__}"
                summary.findings.append(f"{where}: {found} {payload.hex()}")
        rss = psutil.Process().memory_info().rss
        self._memory = self._memory or rss  # after the first batch all kernels are there
        summary.memory_growth_mb = max(0.0, (rss - self._memory) / 2**20)
        return summary

    def _try(self, payload: bytes, k: int, weight: float | None, compare: bool, summary: Summary) -> str:
        """Decode one stream; return what was wrong, or nothing."""
        out = self._out[k]
        np.copyto(out, self._before[k])
        summary.streams += 1
        is_refused = False
        begin = time.perf_counter()
        try:
            self._numba.decode(payload, LAYOUTS[k], out, weight)
        except StreamError:
            is_refused = True
        except Exception as error:  # exactly what is looked for
            summary.foreign_exceptions += 1
            return f"{type(error).__name__}: {error}"
        summary.slowest_s = max(summary.slowest_s, time.perf_counter() - begin)
        summary.errors += is_refused
        summary.decoded += not is_refused
        problem = ""
        if is_refused:
            if weight is not None and not np.array_equal(self._bits[k], self._before_bits[k]):
                problem = "`out` was changed by a stream that was refused"
        elif not np.isfinite(out).all():
            problem = "a value is not finite"
        if compare and not problem:
            problem = self._compare(payload, k, weight, is_refused)
        summary.broken_promises += bool(problem)
        return problem

    def _compare(self, payload: bytes, k: int, weight: float | None, is_refused: bool) -> str:
        other = self._before[k].copy()
        try:
            self._numpy.decode(payload, LAYOUTS[k], other, weight)
        except StreamError:
            return "" if is_refused else "the NumPy backend refuses it"
        if is_refused:
            return "the NumPy backend decodes it"
        return "" if other.tobytes() == self._out[k].tobytes() else "the backends give other bits"


def _work(pipe: Connection, seed: int, compare_every: int) -> None:
    """Answer (batch, streams) with a summary, until there is no more."""
    fuzzer = Fuzzer(seed, compare_every)
    for batch, streams in iter(pipe.recv, None):
        pipe.send(fuzzer.run(batch, streams))


class Worker:
    """One process, its pipe, and what it is working on."""

    def __init__(self, seed: int, compare_every: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs, seed, compare_every), daemon=True)
        self.process.start()
        theirs.close()
        self.batch = -1
        self.since = time.monotonic()

    def give(self, batch: int, streams: int) -> None:
        self.pipe.send((batch, streams))
        self.batch, self.since = batch, time.monotonic()

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


def fuzz(streams: int, seed: int, processes: int, first_batch: int, compare_every: int) -> Summary:
    """Run `streams` streams over some processes, replacing those that crash or hang."""
    summary = Summary(seed=seed)
    begin = time.monotonic()
    work = [
        (first_batch + k, min(BATCH, streams - k * BATCH)) for k in range(-(-streams // BATCH))
    ][::-1]  # fmt: skip
    workers = [Worker(seed, compare_every) for _ in range(min(processes, len(work)))]
    for worker in workers:
        worker.give(*work.pop())
    last_line = begin
    while workers:
        ready = wait([worker.pipe for worker in workers], timeout=5.0)
        for worker in list(workers):
            if worker.pipe in ready:
                try:
                    summary.add(worker.pipe.recv())
                except EOFError:
                    summary.crashes += 1
                    worker.process.join()
                    status = worker.process.exitcode
                    summary.findings.append(f"seed {seed} batch {worker.batch}: exit status {status}")
            elif time.monotonic() - worker.since > HANG_S:
                summary.hangs += 1
                summary.findings.append(f"seed {seed} batch {worker.batch}: no answer for {HANG_S:.0f} s")
            else:
                continue
            if not worker.process.is_alive() or worker.pipe not in ready:
                workers.remove(worker)
                worker.stop()
                if not work:
                    continue
                worker = Worker(seed, compare_every)
                workers.append(worker)
            if work:
                worker.give(*work.pop())
            else:
                workers.remove(worker)
                worker.stop()
        now = time.monotonic()
        if now - last_line > 10:
            last_line = now
            print(
                f"seed {seed}: {summary.streams} streams, {summary.streams / (now - begin):.0f} a second, "
                f"{summary.decoded} decoded, {len(summary.findings)} findings",
                file=sys.stderr,
            )
    summary.seconds = round(time.monotonic() - begin, 3)
    return summary


def main() -> int:
    parser = argparse.ArgumentParser(description="Fuzz the decoder of the codec `dct`.")
    parser.add_argument("--streams", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--first-batch", type=int, default=0)
    parser.add_argument("--compare-every", type=int, default=COMPARE_EVERY, help="streams to one by NumPy")
    args = parser.parse_args()
    print(f"seed {args.seed}", file=sys.stderr)
    summary = fuzz(args.streams, args.seed, args.processes, args.first_batch, args.compare_every)
    print(json.dumps(asdict(summary), indent=1))
    return 0 if summary.is_clean else 1


if __name__ == "__main__":
    sys.exit(main())
