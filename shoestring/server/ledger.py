"""Remember which pushes a part has applied, so that each counts once.

A push is named by `(worker, incarnation, seq)`. A worker starts a new incarnation when
it (re)starts and numbers its pushes by the rounds they belong to, without gaps, from the
round it entered at. After a timeout it sends the same push again under the same name.
The ledger keeps one mark per worker, so its size does not grow with the run.

It is written into the same checkpoint as the parameters: restoring one without the other
would apply or lose a push.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from shoestring.errors import StaleWorkerError


class Verdict(enum.Enum):
    APPLY = "apply"  # new: apply it, then acknowledge
    REPEAT = "repeat"  # applied before: acknowledge, change nothing
    EARLY = "early"  # an earlier push is missing


@dataclass(frozen=True)
class Mark:
    """The last push of a worker that was applied."""

    incarnation: int
    seq: int


class PushLedger:
    """Decides, for one part, whether a push is new. Not thread-safe."""

    def __init__(self, marks: Mapping[int, Mark] | None = None) -> None:
        self._marks = dict(marks or {})

    def enter(self, worker: int, incarnation: int, seq: int) -> None:
        """Open an incarnation whose first push will be `seq`; asking again never makes a push new again."""
        self.refuse_older(worker, incarnation)
        mark = self._marks.get(worker)
        applied = mark.seq if mark is not None and mark.incarnation == incarnation else 0
        self._marks[worker] = Mark(incarnation, max(applied, seq - 1))

    def judge(self, worker: int, incarnation: int, seq: int) -> Verdict:
        """Say what to do with a push; `record` it only after it is applied."""
        self.refuse_older(worker, incarnation)
        mark = self._marks.get(worker)
        if mark is None or incarnation > mark.incarnation:
            return Verdict.EARLY
        if seq <= mark.seq:
            return Verdict.REPEAT
        return Verdict.APPLY if seq == mark.seq + 1 else Verdict.EARLY

    def record(self, worker: int, incarnation: int, seq: int) -> None:
        """Note that a push was applied."""
        mark = self._marks.get(worker)
        # A worker may have come back while the last push of its former life was being applied.
        if mark is None or incarnation >= mark.incarnation:
            self._marks[worker] = Mark(incarnation, seq)

    def seq(self, worker: int) -> int:
        """The last push applied of a worker, 0 if there is none."""
        mark = self._marks.get(worker)
        return 0 if mark is None else mark.seq

    def incarnation(self, worker: int) -> int:
        """The life of a worker that is open, 0 if there is none."""
        mark = self._marks.get(worker)
        return 0 if mark is None else mark.incarnation

    def marks(self) -> dict[int, Mark]:
        """What a checkpoint needs."""
        return dict(self._marks)

    def refuse_older(self, worker: int, incarnation: int) -> None:
        """Raise `StaleWorkerError` if a later incarnation is open."""
        mark = self._marks.get(worker)
        if mark is not None and incarnation < mark.incarnation:
            raise StaleWorkerError(
                f"worker {worker} spoke as incarnation {incarnation}, but {mark.incarnation} is open",
                hint="stop the older process; two workers are running under one id",
            )
