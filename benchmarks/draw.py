"""Draw the charts and write the tables that documents show, from committed results.

    python -m benchmarks.draw

Tables stand between `<!-- table: NAME -->` and `<!-- end -->`; a test writes them anew and compares.
"""

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot as plt
from matplotlib.ticker import NullFormatter

from benchmarks.compatibility import table as compatibility
from benchmarks.scale import table as scaletable
from benchmarks.train.table import lines, summarise

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
DOCUMENTS = (
    "README.md",
    "docs/batchnorm.md",
    "docs/benchmark.md",
    "docs/compatibility.md",
    "docs/scale.md",
    "docs/training.md",
)
LINKS = {
    "10mbit-40ms": "10 Mbit/s, 40 ms",
    "100mbit-10ms": "100 Mbit/s, 10 ms",
    "1gbit-1ms": "1 Gbit/s, 1 ms",
    "loopback": "one machine",
}
TRAININGS = {"conv": "train", "gpt": "train_gpt"}  # the results of each workload
OURS, OTHERS = "#d1495b", "#8d99ae"
_TABLE = re.compile(r"(<!-- table: ([a-z0-9 -]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def load(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def draw_train() -> None:
    """Seconds until the residual net has reached its target, link by link."""
    found = load("train")
    figure, panels = plt.subplots(1, 3, figsize=(10, 3.6), layout="constrained", sharey=True)
    names = list(dict.fromkeys(row["contestant"] for row in found["rows"]))[::-1]
    for axes, link in zip(panels, list(LINKS)[:3], strict=True):
        means = {one["contestant"]: one["seconds_to_target"] for one in _means(found, "conv", link)}
        reached = [value for value in means.values() if value is not None]
        left = min(reached) / 2  # a bar that begins there has no length
        colours = [OURS if name.startswith("shoestring") else OTHERS for name in names]
        bars = axes.barh(names, [means.get(name) or left for name in names], color=colours)
        labels = [_label(means.get(name, "no result")) for name in names]
        axes.bar_label(bars, labels, padding=2, fontsize=8)
        axes.set_title(LINKS[link], fontsize=10)
        axes.set_xscale("log")
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlim(left, 4 * max(reached))
        axes.tick_params(labelsize=8)
    figure.supxlabel(
        f"seconds to {found['targets']['conv']:g} % on Fashion-MNIST, a residual net on two hosts", fontsize=9
    )
    _save(figure, "train.svg")


def _label(seconds: float | str | None) -> str:
    if isinstance(seconds, str):
        return seconds
    return "never" if seconds is None else f"{seconds:,.0f} s"


def _means(found: Any, workload: str, link: str, hosts: int = 2) -> list[dict[str, Any]]:
    return summarise(
        row
        for row in found["rows"]
        if (row["workload"], row["link"], row["hosts"]) == (workload, link, hosts)
    )


def _save(figure: Any, name: str) -> None:
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(ROOT / "docs" / name, metadata={"Date": None})


def table_of_train(workload: str, link: str, hosts: int) -> list[str]:
    wanted = (workload, link, hosts)
    rows = [
        row
        for row in load(TRAININGS[workload])["rows"]
        if (row["workload"], row["link"], row["hosts"]) == wanted
    ]
    return lines({"rows": rows, "left_out": []})[2:-1]


def table_of_ablation(workload: str) -> list[str]:
    return lines({"ablation": [row for row in load("ablation")["ablation"] if row["workload"] == workload]})


def table_of_local_steps() -> list[str]:
    return lines({"ablation": load("local_steps")["ablation"]})


def table_of_batchnorm() -> list[str]:
    """Accuracies, means over the seeds."""
    lines = ["| case | policy | local | shared | joined | recovered |", "|---|---|---|---|---|---|"]
    for row in load("batchnorm")["summary"]:
        means = " | ".join(f"{100 * row[norm]:.2f}" for norm in ("local", "shared", "joined"))
        recovered = "-" if row["recovered"] is None else f"{row['recovered']:.0%}"
        lines.append(f"| {row['case']} | {row['policy']} | {means} | {recovered} |")
    return lines


def table_of_delay() -> list[str]:
    lines = ["| batch of a worker | statistics | step | against local |", "|---|---|---|---|"]
    for row in load("batchnorm")["delay"]:
        lines.append(f"| {row['batch']} | {row['norm']} | {row['step_ms']:.1f} ms | {row['ratio']:.3f} |")
    return lines


def tables() -> dict[str, Callable[[], list[str]]]:
    """By name, what writes the lines of each table."""
    made: dict[str, Callable[[], list[str]]] = {
        name: partial(list, own) for name, own in scaletable.tables(load("scale")).items()
    }
    made |= {name: partial(list, own) for name, own in compatibility.tables(load("compatibility")).items()}
    made |= {"batchnorm": table_of_batchnorm, "batchnorm delay": table_of_delay}
    made["ablation local"] = table_of_local_steps
    for workload in TRAININGS:
        made[f"ablation {workload}"] = partial(table_of_ablation, workload)
        for link in LINKS:
            for hosts in (2, 4, 8):
                name = f"train {workload} {link}" + (f" {hosts} hosts" if hosts > 2 else "")
                made[name] = partial(table_of_train, workload, link, hosts)
    return made


def renew(text: str) -> str:
    """A document with its tables written anew."""
    known = tables()

    def write(found: re.Match[str]) -> str:
        return found[1] + "\n".join(known[found[2]]()) + "\n" + found[4]

    return _TABLE.sub(write, text)


def main() -> None:
    plt.rcParams["svg.hashsalt"] = "shoestring"
    draw_train()
    for name in DOCUMENTS:
        path = ROOT / name
        path.write_text(renew(path.read_text()))


if __name__ == "__main__":
    main()
