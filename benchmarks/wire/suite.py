"""All that `python -m benchmarks.wire` measures, in order, and how it is shown to people."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.wire import footprint, shardcost
from benchmarks.wire.load import ADAMW, SGD
from shoestring.bench.codec.report import print_table
from shoestring.bench.machine import Memcpy
from shoestring.bench.recipe import Progress
from shoestring.bench.wire import rounds as wire

COPY_MIB = 128
_SHARD_CODEC = "dct:bits=0.1"
_MANY = 16  # workers, to show that a shard's memory does not depend on them


@dataclass(frozen=True)
class Effort:
    """How much is measured."""

    rounds: wire.Effort = wire.FULL
    memory_mb: float = 160.0
    footprints: int = 5
    growth_mb: float = 8.0
    most_workers: int = 64
    repeats: int = 5


FULL = Effort()
QUICK = Effort(
    rounds=wire.QUICK,
    memory_mb=1.0,
    footprints=2,
    growth_mb=0.25,
    most_workers=4,
    repeats=2,
)


@dataclass(frozen=True)
class Found(wire.Found):
    """Rounds, and what a shard and a worker cost by themselves."""

    update: list[shardcost.UpdateRow]
    growth: list[shardcost.GrowthRow]
    memory: list[footprint.MemoryRow]


def measure(
    effort: Effort, links: Sequence[str], codecs: Sequence[str], memcpy: Memcpy, progress: Progress
) -> Found:
    """Measure rounds on every link that can be had, then updates, growth and memory."""
    values = int(effort.rounds.size_mb * 1e6) // 4
    found = wire.measure(links, effort.rounds, codecs, progress)

    updates = [(codec, rule) for codec in codecs for rule in (SGD, ADAMW)]
    update: list[shardcost.UpdateRow] = []
    for codec, rule in updates:
        progress("measuring a shard's updates", len(update), len(updates))
        update.append(shardcost.measure_update(values, codec, rule, memcpy, effort.repeats))

    counts = [1 << power for power in range(effort.most_workers.bit_length())]
    progress("measuring a shard with more workers", 0, 1)
    growth = shardcost.measure_growth(int(effort.growth_mb * 1e6) // 4, _SHARD_CODEC, counts, effort.repeats)

    large = int(effort.memory_mb * 1e6) // 4
    processes: list[Callable[[], footprint.MemoryRow]] = [
        lambda: footprint.measure_shard(large, _SHARD_CODEC, ADAMW, 2),
        lambda: footprint.measure_worker(large, _SHARD_CODEC),
        lambda: footprint.measure_shard(large, _SHARD_CODEC, ADAMW, _MANY),
        lambda: footprint.measure_shard(large, "float32", ADAMW, 2),
        lambda: footprint.measure_worker(large, "float32"),
    ][: effort.footprints]
    memory: list[footprint.MemoryRow] = []
    for measure_one in processes:
        progress("measuring memory", len(memory), len(processes))
        memory.append(measure_one())
    return Found(found.rows, found.left_out, update, growth, memory)


def show(found: Found) -> None:
    """Print tables."""
    wire.show(found)
    print_table(
        "a shard's update, on one core",
        ("codec", "rule", "ms", "GB/s", "of a copy"),
        [
            (
                *(row.codec, row.rule, f"{row.update_ms:.1f}"),
                *(f"{row.update_gbps:.2f}", f"{row.over_memcpy:.1%}"),
            )
            for row in found.update
        ],
    )
    print_table(
        "a shard with more workers",
        ("workers", "round ms", "a worker ms", "of linear"),
        [
            (
                *(str(row.workers), f"{row.round_ms:.1f}"),
                *(f"{row.worker_ms:.2f}", f"{row.over_linear:.1%}"),
            )
            for row in found.growth
        ],
    )
    print_table(
        "memory",
        ("process", "codec", "workers", "MB", "limit MB", "holds"),
        [
            (
                *(row.process, row.codec, str(row.workers)),
                *(f"{row.bytes / 1e6:.0f}", f"{row.limit_bytes / 1e6:.0f}"),
                "yes" if row.holds else "no",
            )
            for row in found.memory
        ],
    )
