"""What a worker writes into the event log while it trains."""

import time
from typing import Any

from shoestring.worker.coder import PartCoder
from shoestring.worker.exchange import Exchange
from shoestring.worker.rounds.pilot import Pilot
from shoestring.worker.session import Session, found

_EVERY_S = 0.5


class Reporter:
    """Sums up rounds and writes a `step` event about twice a second."""

    def __init__(self, here: Session, exchange: Exchange, coder: PartCoder, pilot: Pilot) -> None:
        self.loss: float | None = None
        self.total: int | None = None
        self._here = here
        self._exchange = exchange
        self._coder = coder
        self._pilot = pilot
        self._samples = self._reported = 0
        self._steps = self._new = 0  # of the run, and since the last event
        self._before = (0, 0, 0, 0)
        self._waited_s = 0.0
        self._tracking = here.take_tracking()
        self._written_at = time.monotonic()
        here.log.write("join", worker=here.run.worker, workers=here.run.workers)

    def report(
        self, *, loss: float | None = None, samples: int | None = None, total: int | None = None
    ) -> None:
        """Take this step's loss and samples from the script, and how many steps there will be."""
        if loss is not None:
            self.loss = float(loss)
        if total is not None:
            self.total = total
        self._reported += samples or 0

    def round_done(self, seq: int) -> None:
        """Count a round as a step."""
        self.step_done(seq, 0)

    def step_done(self, steps: int, samples: int) -> None:
        """Count a step; write an event if it is time for one."""
        self._samples += samples + self._reported
        self._reported = 0
        self._new += 1
        self._steps = steps
        for seq, what in self._coder.take_skipped():
            self._here.notice(f"step skipped at round {seq}: {what}")
            self._here.log.write("skip", worker=self._here.run.worker, step=seq, tensor=what, is_printed=True)
        if time.monotonic() - self._written_at >= _EVERY_S:
            self._write()

    def move(self, exchange: Exchange, coder: PartCoder, pilot: Pilot) -> None:
        """Go on with another policy's rounds, whose bytes count beside those so far."""
        if self._new:
            self._write()
        exchange.traffic.add(self._exchange.traffic)
        self._exchange, self._coder, self._pilot = exchange, coder, pilot
        self._waited_s = 0.0

    def close(self) -> None:
        """Write what has not been written, and that the worker leaves."""
        if self._new:
            self._write()
        self._here.log.write("leave", worker=self._here.run.worker)

    def _write(self) -> None:
        now, traffic = time.monotonic(), self._exchange.traffic
        counts = (traffic.up, traffic.down, traffic.up_float, traffic.down_float)
        up, down, up_float, down_float = (a - b for a, b in zip(counts, self._before, strict=True))
        fields: dict[str, Any] = {
            "worker": self._here.run.worker,
            "step": self._steps,
            "steps": self._new,
            "total": self.total,
            "loss": self.loss,
            "samples": self._samples or None,
            "seconds": now - self._written_at,
            "waited_s": self._pilot.waited_s - self._waited_s,
            "up_bytes": up,
            "down_bytes": down,
            "up_float_bytes": up_float,
            "down_float_bytes": down_float,
            "codec": self._pilot.codec,
            "level": self._pilot.level,
        }
        self._here.log.write("step", **fields)
        if self._tracking is not None:
            self._tracking.add({"event": "step", "time": time.time(), **fields})
        self._before, self._samples, self._new, self._written_at = counts, 0, 0, now
        self._waited_s = self._pilot.waited_s


def report(*, loss: float | None = None, samples: int | None = None, total: int | None = None) -> None:
    """Tell the run's progress display this step's loss and samples, and how many steps there will be."""
    here = found()
    if here is not None and here.reporter is not None:
        here.reporter.report(loss=loss, samples=samples, total=total)
