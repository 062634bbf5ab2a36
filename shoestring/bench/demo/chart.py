"""The charts of `shoestring demo`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shoestring.bench.demo.suite import DemoRow

_COLOURS = ("#9aa0a6", "#1a73e8")


def draw_picture(rows: Sequence[DemoRow], path: Path) -> Path:
    """Draw loss over time, and seconds and bytes side by side, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (curve, time, size) = pyplot.subplots(
        1, 3, figsize=(11, 3.6), width_ratios=[2.4, 1, 1], layout="constrained"
    )
    for row, colour in zip(rows, _COLOURS, strict=False):
        curve.plot(*zip(*row.loss, strict=True), color=colour, label=_label(row))
        time.bar_label(time.bar(row.name, row.seconds, color=colour), fmt="%.0f")
        size.bar_label(size.bar(row.name, row.bytes_sent / 1e6, color=colour), fmt="%.0f")
    curve.set(xlabel="seconds", ylabel="loss", yscale="log", title="The same steps over the same link")
    curve.legend(frameon=False)
    time.set(title="seconds")
    size.set(title="MB sent")
    for axes in (curve, time, size):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return path


def draw_page(rows: Sequence[DemoRow], path: Path) -> Path:
    """Draw loss over time as a page that carries all it needs."""
    import plotly.graph_objects as graphs

    figure: Any = graphs.Figure()
    for row, colour in zip(rows, _COLOURS, strict=False):
        seconds, losses = zip(*row.loss, strict=True)
        figure.add_trace(graphs.Scatter(x=seconds, y=losses, name=_label(row), line={"color": colour}))
    figure.update_layout(
        title="shoestring demo: the same steps over the same link",
        xaxis_title="seconds",
        yaxis_title="loss",
        yaxis_type="log",
        template="plotly_white",
    )
    figure.write_html(path, include_plotlyjs=True)
    return path


def _label(row: DemoRow) -> str:
    return f"{row.name}: {row.seconds:.0f} s, {row.bytes_sent / 1e6:.1f} MB, {100 * row.accuracy:.1f} %"
