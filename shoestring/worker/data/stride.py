"""Which of the samples that all workers see in one order are a worker's.

A round is the next `size` samples for every worker, in the order of the workers; `size` is what a
loader puts into a batch. So the first worker has the first batch, the second one the second, and so
on, as with one process that made the batches of all.

A last round for which the samples do not suffice is filled with samples from the start of the
epoch, dropped, or left uneven: then some workers have a smaller batch, or none.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Literal, TypeVar

Sample = TypeVar("Sample")
End = Literal["fill", "drop", "uneven"]


@dataclass(frozen=True)
class Stride:
    """One worker's way through the samples."""

    worker: int
    workers: int
    size: int
    end: End

    def batches(self, take: Callable[[int], list[Sample]]) -> Iterator[list[Sample]]:
        """This worker's batches; `take` returns the next samples, fewer only where there are no more."""
        whole, own = self.workers * self.size, slice(self.worker * self.size, (self.worker + 1) * self.size)
        first: list[Sample] = []
        while len(samples := take(whole)) == whole:
            yield samples[own]
            if self.end == "fill":
                first = first or samples
        if self.end == "fill" and samples:
            samples = [*samples, *islice(cycle(first or samples), whole - len(samples))]
            yield samples[own]
        elif self.end == "uneven" and samples[own]:
            yield samples[own]

    def samples(self, total: int) -> int:
        """How many of so many samples are this worker's."""
        rounds, rest = divmod(total, self.workers * self.size)
        if self.end == "fill":
            rounds, rest = rounds + (rest > 0), 0
        elif self.end == "drop":
            rest = 0
        return rounds * self.size + min(max(rest - self.worker * self.size, 0), self.size)
