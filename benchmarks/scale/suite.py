"""Rounds of 8 to 10,000 workers, from a model that real runs of a few have calibrated.

`calibrate` compares what the model says of this machine with what was measured here, for
every run; prices come from some of the runs only, so the others show what a prediction is
worth. `sweep` then lets the model go where this machine cannot: a worker on every host,
shards on every host or just on as many as the model has parts.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.scale import crowd as scalecrowd
from benchmarks.scale import runs as scaleruns
from benchmarks.scale.costs import Costs, Run, Usage, fit_costs
from benchmarks.scale.model import LINK, Cluster, Outcome, limit_s, simulate, stretch
from shoestring.bench.recipe import Progress
from shoestring.codec.registry import LOSSLESS, make
from shoestring.errors import ShoestringError, UsageError
from shoestring.model.parts import Part, assign

DISTURBED = scaleruns.DISTURBED
CODECS = ("float32", "dct:bits=0.1")
LINKS = {"1gbit": 1e9, "25gbit": 25e9}
SOCKET_LIMIT = 1023  # of one process: ZeroMQ's own
_GROUPS = 64  # in which workers without a part move: within 0.5 % of each by itself
_SHARD_THREADS = ("service", "update", "shard_io")
_SLOWER = 2.0
_TOO_LARGE = 64 << 20  # bytes of a saved calibration


@dataclass(frozen=True)
class Effort:
    """What is measured, which of it prices come from, and what is simulated."""

    runs: scaleruns.Effort
    fitted: tuple[int, ...]
    workers: tuple[int, ...]
    sizes_mb: tuple[float, ...]


FULL = Effort(scaleruns.FULL, (2, 16), (8, 32, 128, 512, 2000, 10_000), (40.0, 1000.0))
QUICK = Effort(scaleruns.QUICK, (2, 4), (8, 128, 2000), (40.0,))


@dataclass(frozen=True)
class Comparison:
    """One measured run beside what the model says of it."""

    codec: str
    workers: int
    size_mb: float
    measured_ms: float
    fastest_ms: float
    predicted_ms: float
    error: float  # of the prediction, relative
    is_fitted: bool  # prices come from this run's processor time
    others: float  # the share of the machine's time that other processes took: more than a little spoils it
    memory_mb: float  # of the largest shard, beyond the program
    predicted_memory_mb: float
    rounds: int  # that count
    usage: Usage  # seconds of a round by thread


@dataclass(frozen=True)
class Row:
    """One simulated round. `None`: the round never ends."""

    workers: int
    shards: int
    parts: int
    link: str
    codec: str
    size_mb: float
    round_ms: float | None
    limit_ms: float  # 2 (N-1)/N times the payload, over the link's rate
    shard_load: float  # how much of the round the busiest thread of the busiest shard works
    shard_cores: float  # processor seconds of the busiest shard over those of the round
    link_load: float  # how much of the round the busiest line carries something
    shard_memory_mb: float
    bottleneck: str
    problem: str  # why this cannot be set up; empty if it can


@dataclass(frozen=True)
class Reach:
    """About the most workers whose round takes no longer than twice that of the fewest."""

    link: str
    codec: str
    size_mb: float
    workers: int


def measure(
    effort: Effort, codecs: Sequence[str], progress: Progress
) -> tuple[list[Costs], list[Comparison]]:
    """Calibrate the model by real runs on this machine."""
    crowd = scalecrowd.measure()
    runs = scaleruns.measure(effort.runs, codecs, progress)
    return calibrate(runs, effort.fitted, lambda some: fit_costs(some, crowd))


def calibrate(
    runs: Sequence[Run], fitted: Sequence[int], fit: Any = fit_costs
) -> tuple[list[Costs], list[Comparison]]:
    """Find prices from the runs of `fitted` workers, and compare all runs with the model."""
    costs = {
        codec: fit([run for run in runs if run.codec == codec and run.workers in fitted])
        for codec in dict.fromkeys(run.codec for run in runs)
    }
    return list(costs.values()), [_compare(run, costs[run.codec], run.workers in fitted) for run in runs]


def _compare(run: Run, costs: Costs, is_fitted: bool) -> Comparison:
    predicted_s = predict(run, costs)
    cluster = Cluster(run.workers, run.workers, run.parts, run.homes)
    return Comparison(
        codec=run.codec,
        workers=run.workers,
        size_mb=run.size_mb,
        measured_ms=1e3 * run.round_s,
        fastest_ms=1e3 * run.fastest_s,
        predicted_ms=1e3 * predicted_s,
        error=predicted_s / run.round_s - 1,
        is_fitted=is_fitted,
        others=run.others,
        memory_mb=1e-6 * run.memory_bytes,
        predicted_memory_mb=1e-6 * memory_bytes(cluster, costs),
        rounds=run.rounds,
        usage=run.usage,
    )


def predict(run: Run, costs: Costs) -> float:
    """What the model says of a run on one machine, where all threads share its cores."""
    cluster = Cluster(
        workers=run.workers,
        shards=run.workers,
        parts=run.parts,
        homes=run.homes,
        latency_s=0.0,
        threads=run.threads,
        is_one_machine=True,
    )
    return stretch(simulate(cluster, costs, is_recorded=True), run.cores)


def memory_bytes(cluster: Cluster, costs: Costs) -> float:
    """What the shard with the most takes for a run with momentum: values, pushes, answers."""
    vectors = 2 + (make(costs.codec).name != LOSSLESS)
    held: dict[int, float] = {}
    for size, home in zip(cluster.parts, cluster.homes, strict=True):
        pushes = cluster.workers * costs.up.of(size)  # all are kept until the last has come
        held[home] = held.get(home, 0.0) + 4 * size * vectors + pushes + costs.down.of(size)
    return max(held.values())


def sweep(effort: Effort, costs: Sequence[Costs], progress: Progress) -> list[Row]:
    """Simulate every number of workers, link, codec and size."""
    cases = [
        (size_mb, workers, link, price)
        for size_mb in effort.sizes_mb
        for link in LINKS
        for price in costs
        for workers in effort.workers
    ]
    cuts = {size_mb: scaleruns.parts_of(size_mb) for size_mb in effort.sizes_mb}
    rows: list[Row] = []
    for done, (size_mb, workers, link, price) in enumerate(cases):
        progress(f"simulating {workers:,} workers", done, len(cases))
        parts = cuts[size_mb]
        # More shards than parts hold nothing, but every worker is connected with them.
        for shards in dict.fromkeys((min(workers, len(parts)), workers)):
            rows.append(_row(price, parts, workers, shards, link, size_mb))
    return rows


def find_reach(rows: Sequence[Row]) -> list[Reach]:
    """Look where rounds begin to take much longer, with as many shards as hold parts."""
    kinds: dict[tuple[str, str, float], list[Row]] = {}
    for row in rows:
        if row.shards == min(row.workers, row.parts):
            kinds.setdefault((row.link, row.codec, row.size_mb), []).append(row)
    return [Reach(*kind, _reach(sorted(some, key=lambda row: row.workers))) for kind, some in kinds.items()]


def _reach(rows: Sequence[Row]) -> int:
    """Between two rows a round's time is taken to be a power of the number of workers."""
    low = rows[0]
    if low.round_ms is None:
        return 0
    allowed_ms = _SLOWER * low.round_ms
    for high in rows[1:]:
        if high.round_ms is None:
            break
        if high.round_ms > allowed_ms:
            share = math.log(allowed_ms / low.round_ms) / math.log(high.round_ms / low.round_ms)
            return int(low.workers * (high.workers / low.workers) ** share)
        low = high
    return low.workers


def _row(costs: Costs, parts: Sequence[Part], workers: int, shards: int, link: str, size_mb: float) -> Row:
    sizes = tuple(part.size for part in parts)
    cluster = Cluster(workers, shards, sizes, assign(parts, shards), LINKS[link])
    outcome = simulate(cluster, costs, groups=_GROUPS)
    up, down = (sum(price.of(size) for size in sizes) for price in (costs.up, costs.down))
    is_endless = math.isinf(outcome.round_s)
    return Row(
        workers=workers,
        shards=shards,
        parts=len(parts),
        link=link,
        codec=costs.codec,
        size_mb=size_mb,
        round_ms=None if is_endless else 1e3 * outcome.round_s,
        limit_ms=1e3 * limit_s(workers, up, down, LINKS[link]),
        shard_load=1.0 if is_endless else _load(outcome, _SHARD_THREADS),
        shard_cores=0.0 if is_endless else outcome.shard_s / outcome.round_s,
        link_load=0.0 if is_endless else _load(outcome, LINK),
        shard_memory_mb=1e-6 * memory_bytes(cluster, costs),
        bottleneck=outcome.bottleneck,
        problem=f"a worker opens at most {SOCKET_LIMIT} sockets" if shards > SOCKET_LIMIT else "",
    )


def _load(outcome: Outcome, kinds: Sequence[str]) -> float:
    return max(outcome.busy_s[kind] for kind in kinds) / outcome.round_s


def save(
    costs: Sequence[Costs],
    comparisons: Sequence[Comparison],
    rows: Sequence[Row],
) -> dict[str, Any]:
    """What the command delivers; `load` reads the first two of it."""
    return {
        "calibration": [asdict(entry) for entry in comparisons],
        "costs": [asdict(entry) for entry in costs],
        "rows": [asdict(row) for row in rows],
        "reach": [asdict(entry) for entry in find_reach(rows)],
    }


class _Saved(msgspec.Struct):
    calibration: list[Comparison]
    costs: list[Costs]


def load(path: Path, codecs: Sequence[str] | None = None) -> tuple[list[Costs], list[Comparison]]:
    """Read a calibration from what this command wrote before: of all its codecs, or of some."""
    try:
        if path.stat().st_size > _TOO_LARGE:
            raise ShoestringError(f"`{path}` is too large", hint="give what `bench scale --output` wrote")
        saved = msgspec.json.decode(path.read_bytes(), type=_Saved)
    except (OSError, msgspec.MsgspecError, RecursionError) as error:
        raise UsageError(
            f"`{path}` holds no calibration: {error}", hint="give what `bench scale --output` wrote"
        ) from None
    known = {entry.codec: entry for entry in saved.costs}
    missing = [codec for codec in codecs or known if codec not in known]
    if missing or not known:
        raise UsageError(
            f"`{path}` has no costs of `{missing[0] if missing else 'any codec'}`",
            hint="measure it: leave `--calibration` out",
        )
    chosen = [known[codec] for codec in codecs or known]
    names = {entry.codec for entry in chosen}
    return chosen, [entry for entry in saved.calibration if entry.codec in names]
