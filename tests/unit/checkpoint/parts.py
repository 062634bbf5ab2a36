"""Parts of a small model, as a shard describes them for a checkpoint, and who hears what is written."""

import threading

import numpy as np

from shoestring.checkpoint.part import PartMarks, PartValues
from shoestring.checkpoint.shard import ShardWriter

SIZES = (600, 7)
MARKS = PartMarks(version=5, round=3, has_kept=True, ledger={"0": (1, 3), "1": (2, 3)})


def make_part(index: int, *, seed: int = 0, has_feedback: bool = True, digest: str = "") -> PartValues:
    """A part with random values; with a digest it has statistics of layers."""
    rng = np.random.default_rng((seed, index))

    def vector() -> np.ndarray:
        return rng.standard_normal(SIZES[index]).astype(np.float32)

    return PartValues(
        index=index,
        params=vector(),
        feedback=vector() if has_feedback else None,
        steps=rng.integers(0, 9, 2),
        optimizer={"momentum": vector()},
        statistics={digest: rng.standard_normal(4)} if digest else {},
    )


class Written:
    """Waits for what a shard's writer reports."""

    def __init__(self, writer: ShardWriter) -> None:
        self.reports: list[tuple[int, bytes | None, str]] = []
        self._came = threading.Semaphore(0)
        writer.on_written = self._take

    def _take(self, seq, record, why):
        self.reports.append((seq, record, why))
        self._came.release()

    def wait(self) -> tuple[int, bytes | None, str]:
        assert self._came.acquire(timeout=30)
        return self.reports[-1]
