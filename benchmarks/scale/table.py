"""How `python -m benchmarks.scale` is shown to people."""

from collections.abc import Sequence
from typing import Any

from benchmarks.scale.suite import DISTURBED, Comparison, Row, find_reach
from shoestring.bench.codec.report import print_table

_WIDTH = 120
_LINKS = {"1gbit": "1 Gbit/s", "25gbit": "25 Gbit/s"}
_BOTTLENECKS = {
    "encode": "worker encodes",
    "apply": "worker decodes",
    "worker_io": "worker encrypts",
    "shard_io": "shard decrypts",
    "service": "shard's messages",
    "update": "shard sums",
    "link_out": "shard's line",
    "link_in": "shard's line",
    "beats": "beats",
}


def show(comparisons: Sequence[Comparison], rows: Sequence[Row]) -> None:
    """Print two tables: what the model is worth here, and what it says."""
    print_table(
        "measured on this machine, and predicted (* costs come from it, ! other processes disturbed it)",
        ("codec", "MB", "workers", "measured ms", "predicted ms", "error"),
        [
            (
                *(entry.codec, f"{entry.size_mb:g}", f"{entry.workers}{_marks(entry)}"),
                *(f"{entry.measured_ms:.1f}", f"{entry.predicted_ms:.1f}", f"{entry.error:+.1%}"),
            )
            for entry in comparisons
        ],
        _WIDTH,
    )
    print_table(
        "simulated",
        (
            "codec",
            "MB",
            "link",
            "workers",
            "shards",
            "round s",
            "limit s",
            "shard",
            "link ",
            "MB a shard",
            "by",
        ),
        [
            (
                *(row.codec, f"{row.size_mb:g}", row.link, f"{row.workers:,}", f"{row.shards:,}"),
                "never" if row.round_ms is None else f"{row.round_ms / 1e3:.3f}",
                *(f"{row.limit_ms / 1e3:.3f}", f"{row.shard_load:.0%}", f"{row.link_load:.0%}"),
                *(f"{row.shard_memory_mb:,.0f}", row.bottleneck),
            )
            for row in rows
            if not row.problem
        ],
        _WIDTH,
    )
    for problem in dict.fromkeys(row.problem for row in rows if row.problem):
        print(f" left out of the table: {problem}")

    for entry in find_reach(rows):
        print(
            f" {entry.codec}, {entry.size_mb:g} MB, {entry.link}: up to about {entry.workers:,} workers "
            "a round takes at most twice as long as with the fewest"
        )


def _marks(entry: Comparison) -> str:
    return ("*" if entry.is_fitted else "") + ("!" if entry.others > DISTURBED else "")


def tables(found: dict[str, Any]) -> dict[str, list[str]]:
    """The lines of the tables that a document shows, by name, from what the command delivered."""
    made = {"scale calibration": _calibration(found["calibration"]), "scale reach": _reach(found)}
    for size_mb in dict.fromkeys(row["size_mb"] for row in found["rows"]):
        made[f"scale {size_mb:g}"] = _rows(found["rows"], size_mb)
    return made


def _rows(rows: Sequence[dict[str, Any]], size_mb: float) -> list[str]:
    """One model, as many shards as hold parts, codecs and links side by side."""
    columns = list(dict.fromkeys((row["codec"], row["link"]) for row in rows))
    best = {
        (row["workers"], row["codec"], row["link"]): row
        for row in rows
        if row["size_mb"] == size_mb and row["shards"] == min(row["workers"], row["parts"])
    }
    lines = [f"| workers | {' | '.join(_heads(columns))} |", "|---:" * (1 + len(columns)) + "|"]
    for workers in dict.fromkeys(key[0] for key in best):
        cells = [_cell(best[workers, *column]) for column in columns]
        lines.append(f"| {workers:,} | {' | '.join(cells)} |")
    return lines


def _reach(found: dict[str, Any]) -> list[str]:
    parts = {row["size_mb"]: row["parts"] for row in found["rows"]}
    reach = {(entry["codec"], entry["link"], entry["size_mb"]): entry["workers"] for entry in found["reach"]}
    columns = list(dict.fromkeys(key[:2] for key in reach))
    lines = [f"| model | {' | '.join(_heads(columns))} |", "|---|" + "---:|" * len(columns)]
    for size_mb, count in parts.items():
        cells = [f"{reach[*column, size_mb]:,}" for column in columns]
        lines.append(f"| {size_mb:g} MB, {count} parts | {' | '.join(cells)} |")
    return lines


def _calibration(entries: Sequence[dict[str, Any]]) -> list[str]:
    """What was measured beside what the model says."""
    lines = ["| codec | MB | workers | measured | predicted | off by |", "|---|---:|---:|---:|---:|---:|"]
    for entry in entries:
        marks = "" if entry["is_fitted"] else " (held out)"
        marks += " (disturbed)" if entry["others"] > DISTURBED else ""
        lines.append(
            f"| `{entry['codec']}` | {entry['size_mb']:g} | {entry['workers']}{marks} | "
            f"{entry['measured_ms']:.0f} ms | {entry['predicted_ms']:.0f} ms | {entry['error']:+.0%} |"
        )
    return lines


def _heads(columns: Sequence[tuple[str, str]]) -> list[str]:
    return [f"`{codec}`, {_LINKS[link]}" for codec, link in columns]


def _cell(row: dict[str, Any]) -> str:
    took = "never" if row["round_ms"] is None else f"{row['round_ms'] / 1e3:.3g} s"
    memory = f"{row['shard_memory_mb']:,.0f} MB"
    return (
        f"{took} ({row['limit_ms'] / 1e3:.2g}); {_BOTTLENECKS[row['bottleneck']]}; "
        f"{row['shard_load']:.0%}, {row['link_load']:.0%}, {memory}"
    )
