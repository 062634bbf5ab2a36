"""When a checkpoint is due: the one place where it is decided whether a round is saved.

Every worker asks `is_due` with a round's number alone, so all workers answer alike without a word
to each other. The answer goes with the worker's pushes of that round (`Push.save`): a shard saves
the rounds whose pushes say so, and has no schedule of its own.
"""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Schedule:
    """A checkpoint after every `every` rounds; 0: none."""

    every: int = 0

    def is_due(self, seq: int) -> bool:
        """Say whether there is to be a checkpoint of round `seq`, which counts from 1."""
        return self.every > 0 and seq % self.every == 0


def schedule_for(folder: Path | None, every: int) -> Schedule:
    """The schedule of a run: without a folder for checkpoints there are none."""
    return Schedule(every if folder is not None else 0)
