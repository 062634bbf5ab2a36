"""Which job was on which device when: from the history of a fleet to a chart."""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoestring.errors import FleetError
from shoestring.fleet.run.database import Change

_COLOURS = ("#1a73e8", "#e8710a", "#188038", "#a142f4", "#d93025", "#12a4af", "#9aa0a6", "#f9ab00")


@dataclass(frozen=True)
class Interval:
    """A job on a device, from one moment of the wall clock to another; `end` says how it left."""

    job: str
    device: str
    start_at: float
    end_at: float
    end: str


def intervals(history: Iterable[Change], now: float | None = None) -> list[Interval]:
    """List when jobs ran; one that still runs ends now. A job of several devices counts on each."""
    now = time.time() if now is None else now
    begun: dict[str, Change] = {}
    found: list[Interval] = []

    def close(job: str, at: float, end: str) -> None:
        if start := begun.pop(job, None):
            places = start.device.split("+")
            found.extend(Interval(job, place, start.at, max(at, start.at), end) for place in places)

    for change in history:
        close(change.job, change.at, change.state)
        if change.state == "running":
            begun[change.job] = change
    for job in list(begun):
        close(job, now, "running")
    return sorted(found, key=lambda one: (one.start_at, one.job, one.device))


def draw(found: list[Interval], path: Path) -> Path:
    """Draw a bar for each interval, a row for each device, as a page that carries all it needs."""
    if not found:
        raise FleetError("no job of this fleet has run yet", hint="run it first: `shoestring fleet run`")
    try:
        import plotly.graph_objects as graphs
    except ModuleNotFoundError:
        raise FleetError(
            "a timeline is drawn with plotly, which is not installed",
            hint="install it with `pip install 'shoestring[bench]'`",
        ) from None
    zero = min(one.start_at for one in found)
    figure: Any = graphs.Figure()
    for number, job in enumerate(dict.fromkeys(one.job for one in found)):
        own = [one for one in found if one.job == job]
        figure.add_trace(
            graphs.Bar(
                name=job,
                orientation="h",
                y=[one.device for one in own],
                base=[one.start_at - zero for one in own],
                x=[one.end_at - one.start_at for one in own],
                text=[job] * len(own),
                customdata=[one.end for one in own],
                hovertemplate="%{text}: %{base:.1f} s for %{x:.1f} s, then %{customdata}<extra></extra>",
                marker={"color": _COLOURS[number % len(_COLOURS)], "line": {"width": 1, "color": "white"}},
                opacity=0.85,
            )
        )
    devices = sorted({one.device for one in found}, reverse=True)
    figure.update_layout(
        title="Which job was on which device",
        barmode="overlay",
        xaxis_title="seconds",
        yaxis={"categoryorder": "array", "categoryarray": devices},
        template="plotly_white",
        height=200 + 60 * len(devices),
    )
    figure.write_html(path, include_plotlyjs=True)
    return path
