"""What workers tell each other to find out that something is wrong: equal batches, unequal parameters.

The first batches of two workers are equal where nobody splits the data: training goes on, but learns
no more than one worker would, so the first worker says so. Where workers update the parameters
themselves, one parameter in turn is compared: once it differs, every further step makes it worse, so the
run ends with its name.
"""

from collections.abc import Callable, Sequence

import google_crc32c
import torch
from torch import nn

from shoestring.errors import ShoestringError
from shoestring.wire.messages import Witness

BATCHES = 3  # so many rounds' first batches are compared
EVERY = 16  # rounds between two comparisons of a parameter


class Watch:
    """One worker's part in it. Used by the training thread alone."""

    def __init__(
        self,
        worker: int,
        notice: Callable[[str], None],
        parameters: Sequence[nn.Parameter] = (),
        names: Sequence[str] = (),
    ) -> None:
        self._worker = worker
        self._notice = notice
        self._parameters = parameters
        self._names = names
        self._batch = 0  # the first since the last round
        self._rounds = 0
        self._twins: set[tuple[int, int]] | None = None  # workers whose batches were equal in every round

    @property
    def is_looking(self) -> bool:
        """Whether the batch that comes is to be shown."""
        return self._rounds < BATCHES and not self._batch

    def show(self, batch: int) -> None:
        """Take the fingerprint of a batch."""
        self._batch = self._batch or batch

    def say(self, seq: int) -> Witness | None:
        """What goes with the push of a round."""
        self._rounds += 1
        batch, self._batch = self._batch, 0
        index, checksum = 0, 0
        if self._parameters and seq % EVERY == 1:
            index = seq // EVERY % len(self._parameters)
            checksum = 1 + checksum_of(self._parameters[index])
        return Witness(self._worker, batch, index, checksum) if batch or checksum else None

    def hear(self, witnesses: Sequence[Witness]) -> None:
        """Compare what all have said of a round; raise if workers have gone apart."""
        sums = [one for one in witnesses if one.checksum]
        for one in sums[1:]:
            first = sums[0]
            if (one.index, one.checksum) != (first.index, first.checksum) and one.index < len(self._names):
                raise ShoestringError(
                    f"workers {first.worker} and {one.worker} hold different values of "
                    f"`{self._names[one.index]}`",
                    hint="let all workers take the same steps: the same optimizer, rates and clipping, no "
                    "step that only some take, and no change of parameters that depends on the worker",
                )
        batches = [one for one in witnesses if one.batch]
        if self._worker or len(batches) < 2:
            return
        twins = {
            (a.worker, b.worker)
            for place, a in enumerate(batches)
            for b in batches[place + 1 :]
            if a.batch == b.batch
        }
        before, self._twins = self._twins, twins
        if before and before & twins:
            first_, second = min(before & twins)
            self._twins = set()  # once is enough
            self._rounds = BATCHES
            self._notice(
                f"workers {first_} and {second} train on the same batches, so {len(witnesses)} workers learn "
                "no more than one: `loader = shoestring.split(loader)` gives each its own"
            )


def checksum_of(parameter: torch.Tensor) -> int:
    """A checksum of a tensor's bits."""
    values = parameter.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    checksum: int = google_crc32c.value(values.numpy().tobytes())
    return checksum
