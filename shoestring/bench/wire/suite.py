"""All that `shoestring bench wire` measures, in order, and how it is shown to people."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from shoestring.bench.codec.report import print_table
from shoestring.bench.link import hosts
from shoestring.bench.machine import Memcpy
from shoestring.bench.recipe import Progress
from shoestring.bench.wire import footprint, shardcost
from shoestring.bench.wire import rounds as wire
from shoestring.bench.wire.load import ADAMW, SGD

_SHARD_CODEC = "dct:bits=0.1"
_MANY = 16  # workers, to show that a shard's memory does not depend on them
_COPY_MIB = 128


def measure(
    effort: wire.Effort, links: Sequence[str], codecs: Sequence[str], progress: Progress
) -> dict[str, Any]:
    """Return the rows of rounds, updates, growth and memory, and the links that were left out."""
    values = int(effort.size_mb * 1e6) // 4
    reasons = {link: hosts.missing(link) for link in links}
    rounds = [
        row for link in links if not reasons[link] for row in wire.measure(link, effort, codecs, progress)
    ]

    memcpy = Memcpy(_COPY_MIB)
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
    return {
        "memcpy_gbps": memcpy.gbps,
        "rows": [asdict(row) for row in rounds],
        "left_out": [{"link": link, "reason": reason} for link, reason in reasons.items() if reason],
        "update": [asdict(row) for row in update],
        "growth": [asdict(row) for row in growth],
        "memory": [asdict(row) for row in memory],
    }


def show(result: dict[str, Any]) -> None:
    """Print tables."""
    print_table(
        "a round against gloo's all-reduce",
        ("codec", "link", "MB", "round ms", "gloo ms", "ratio", "of the link"),
        [
            (
                *(row["codec"], row["link"], f"{row['size_mb']:g}"),
                *(f"{row['round_ms']:.1f}", f"{row['gloo_allreduce_ms']:.1f}", f"{row['ratio']:.3f}"),
                "" if row["limit_fraction"] is None else f"{row['limit_fraction']:.1%}",
            )
            for row in result["rows"]
        ],
    )
    for left in result["left_out"]:
        print(f" {left['link']} is left out: {left['reason']}")
    print_table(
        "a shard's update, on one core",
        ("codec", "rule", "ms", "GB/s", "of a copy"),
        [
            (
                *(row["codec"], row["rule"], f"{row['update_ms']:.1f}"),
                *(f"{row['update_gbps']:.2f}", f"{row['over_memcpy']:.1%}"),
            )
            for row in result["update"]
        ],
    )
    print_table(
        "a shard with more workers",
        ("workers", "round ms", "a worker ms", "of linear"),
        [
            (
                *(str(row["workers"]), f"{row['round_ms']:.1f}"),
                *(f"{row['worker_ms']:.2f}", f"{row['over_linear']:.1%}"),
            )
            for row in result["growth"]
        ],
    )
    print_table(
        "memory",
        ("process", "codec", "workers", "MB", "limit MB", "holds"),
        [
            (
                *(row["process"], row["codec"], str(row["workers"])),
                *(f"{row['bytes'] / 1e6:.0f}", f"{row['limit_bytes'] / 1e6:.0f}"),
                "yes" if row["holds"] else "no",
            )
            for row in result["memory"]
        ],
    )
