"""A tracker is told the numbers that the display shows, and never stops training."""

import math
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from shoestring.observe.events import EventLog
from shoestring.observe.tracking import Rows, Tracking


def step(number: int, **changes: Any) -> dict[str, Any]:
    """What a worker reports of four steps that took two seconds."""
    event = {
        "event": "step",
        "worker": 0,
        "step": number,
        "steps": 4,
        "total": None,
        "loss": 0.5,
        "samples": 64,
        "seconds": 2.0,
        "waited_s": 0.5,
        "up_bytes": 4000,
        "down_bytes": 8000,
        "up_float_bytes": 80_000,
        "down_float_bytes": 40_000,
        "codec": "dct",
        "level": 1,
    }
    return event | changes


ROW = {
    "loss": 0.5,
    "samples_per_s": 32.0,
    "up_bytes_per_step": 1000.0,
    "down_bytes_per_step": 2000.0,
    "smaller": 10.0,
    "waiting": 0.25,
    "level": 1.0,
}


def test_a_row_has_what_is_known() -> None:
    rows = Rows(None)
    assert rows.row(step(4)) == (4, ROW)
    unknown = {"loss": None, "samples": None, "level": None}
    assert rows.row(step(8, loss=None, level=None))[1].keys() == ROW.keys() - {"level"}
    assert Rows(None).row(step(4, **unknown))[1].keys() == ROW.keys() - unknown.keys() - {"samples_per_s"}


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_no_number_is_told(loss: float) -> None:
    rows = Rows(None)
    rows.row(step(4))
    assert str(rows.row(step(8, loss=loss))[1]["loss"]) == str(loss)


def test_other_workers_count_where_their_logs_are(tmp_path: Path) -> None:
    with EventLog(tmp_path, "worker-1") as log:
        log.write("step", **step(99, worker=1))  # of an earlier run
        rows = Rows(tmp_path)
        assert rows.row(step(4)) == (4, ROW)
        log.write("step", **step(5, worker=1, loss=0.7))
        with EventLog(tmp_path, "worker-0") as own:
            own.write("step", **step(8))
            found = rows.row(step(8))[1]
    assert found["lag"] == 3  # of a worker that has just told it
    assert found["loss"] == pytest.approx(0.6)
    assert found["samples_per_s"] == 64


class Page:
    """A tracker that remembers; where it is to fail it does."""

    def __init__(self, fails_at: int = 0) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.fails_at = fails_at
        self.is_closed = False

    def write(self, step: int, values: Mapping[str, float]) -> None:
        if step == self.fails_at:
            raise ConnectionError("the page is gone")
        self.rows.append((step, dict(values)))

    def close(self) -> None:
        self.is_closed = True


def test_all_that_was_added_is_told_before_it_is_closed() -> None:
    page, said = Page(), []
    tracking = Tracking(page, None, said.append)
    for number in range(1, 21):
        tracking.add(step(number))
    tracking.close()
    assert [number for number, _ in page.rows] == list(range(1, 21))
    assert page.is_closed
    assert said == []
    tracking.close()


def test_a_tracker_that_fails_says_so_once_and_training_goes_on() -> None:
    page, said = Page(fails_at=2), []
    tracking = Tracking(page, None, said.append)
    for number in range(1, 1001):
        tracking.add(step(number))
    tracking.close()
    assert [number for number, _ in page.rows] == [1]
    assert said == ["nothing is tracked any more, training goes on: ConnectionError('the page is gone')"]


def test_a_slow_tracker_does_not_hold_up_training() -> None:
    go = threading.Event()

    class Slow(Page):
        def write(self, step: int, values: Mapping[str, float]) -> None:
            assert go.wait(60.0)
            super().write(step, values)

    page = Slow()
    tracking = Tracking(page, None, lambda text: None)
    for number in range(1, 1001):
        tracking.add(step(number))
    go.set()
    tracking.close()
    assert page.is_closed
    assert 256 <= len(page.rows) <= 258
