"""The results of `python -m benchmarks.train` as tables in Markdown."""

import statistics
from collections.abc import Iterable
from typing import Any

Figures = dict[str, Any]


def lines(found: Figures) -> list[str]:
    """A table for each workload, link and number of hosts; DDP is what others are set against."""
    text = _rates(found.get("rates", [])) + _ablation(found.get("ablation", []))
    races = found.get("rows", [])
    groups = sorted({(row["workload"], row["hosts"], row["link"]) for row in races})
    for workload, hosts, link in groups:
        rows = [
            row for row in races if (row["workload"], row["hosts"], row["link"]) == (workload, hosts, link)
        ]
        text += [
            f"### {workload}, {hosts} hosts, {link}",
            "",
            "| contestant | final | to the target | against ddp | step | waiting | MB | fewer bytes |",
            "|---|---|---|---|---|---|---|---|",
        ]
        means = summarise(rows)
        plain = next((one for one in means if one["contestant"] == "ddp"), None)
        text += [_line(one, plain) for one in means]
        text.append("")
    for one in found.get("left_out", []):
        text.append(f"left out: {one.get('contestant', one.get('link'))}: {one['why'].splitlines()[0]}")
    return text


def _rates(rows: list[Figures]) -> list[str]:
    if not rows:
        return []
    text = ["| contestant | workload | rate | final |", "|---|---|---|---|"]
    for row in rows:
        final = "-" if row["final"] is None else f"{row['final']:.3f}"
        text.append(f"| {row['contestant']} | {row['workload']} | {row['rate']:g} | {final} |")
    return text


def _ablation(rows: list[Figures]) -> list[str]:
    if not rows:
        return []
    text = ["| exchange | workload | final | fewer bytes |", "|---|---|---|---|"]
    grouped: dict[tuple[str, str], list[Figures]] = {}
    for row in rows:
        grouped.setdefault((row["variant"], row["workload"]), []).append(row)
    for (variant, workload), own in grouped.items():
        final, fewer = (statistics.fmean(row[key] for row in own) for key in ("final", "fewer_bytes"))
        text.append(f"| {variant} | {workload} | {final:.3f} | {fewer:.0f} x |")
    return text


def summarise(rows: Iterable[Figures]) -> list[Figures]:
    """The means over the seeds, by contestant."""
    grouped: dict[str, list[Figures]] = {}
    for row in rows:
        grouped.setdefault(row["contestant"], []).append(row)
    return [{"contestant": name, **{key: _mean(own, key) for key in _KEYS}} for name, own in grouped.items()]


_KEYS = ("final", "seconds_to_target", "step_ms", "exposed_comm_s", "bytes_total")


def _mean(rows: list[Figures], key: str) -> float | None:
    values = [row[key] for row in rows]
    return None if None in values else statistics.fmean(values)


def _line(one: Figures, plain: Figures | None) -> str:
    def against(key: str) -> str:
        if plain is None or not one[key] or not plain[key]:
            return "-"
        return f"{plain[key] / one[key]:.1f} x"

    seconds = "never" if one["seconds_to_target"] is None else f"{one['seconds_to_target']:.1f} s"
    return (
        f"| {one['contestant']} | {one['final']:.3f} | {seconds} | {against('seconds_to_target')} "
        f"| {one['step_ms']:.1f} ms | {one['exposed_comm_s']:.1f} s | {(one['bytes_total'] or 0) / 1e6:.2f} "
        f"| {against('bytes_total')} |"
    )
