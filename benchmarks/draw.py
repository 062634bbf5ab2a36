"""Draw the README's chart from committed results: `python benchmarks/draw.py`."""

import json
from pathlib import Path

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot as plt

HERE = Path(__file__).parent
SERIES = {
    "topk": "top-k, float32 values",
    "never": "dct without a transform",
    "dct_block_8": "dct, blocks of 8 x 8",
    "dct": "dct, blocks that fit the kernels",
}


def main() -> None:
    rows = [
        row
        for row in json.loads((HERE / "results" / "codec.json").read_text())["transform"]
        if row["gradients"] == "conv"
    ]
    plt.rcParams["svg.hashsalt"] = "shoestring"
    figure, axes = plt.subplots(figsize=(7, 2.8), layout="constrained")
    height = 0.8 / len(SERIES)
    for place, (key, label) in enumerate(SERIES.items()):
        bits = [row[key] for row in rows]
        at = [index + 0.4 - height * (place + 0.5) for index in range(len(rows))]
        bars = axes.barh(at, bits, height, label=label)
        axes.bar_label(bars, [f"{value:.2f}" for value in bits], padding=2, fontsize=8)
    axes.set_yticks(range(len(rows)), [f"error {row['nmse']:g}" for row in rows])
    axes.set_xscale("log")
    axes.set_xlim(right=60)
    axes.set_xlabel("bits a value (float32: 32), gradients of a residual net")
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    target = HERE.parent / "docs" / "codec.svg"
    target.parent.mkdir(exist_ok=True)
    figure.savefig(target, metadata={"Date": None})


if __name__ == "__main__":
    main()
