"""What a shard saves of a part, and how a part goes on from a checkpoint.

The checkpoint's side, names and files, is in `checkpoint.part`; here a `Desk` and its `Holding`
are described in its terms.
"""

from collections.abc import Callable

import numpy as np

from shoestring.checkpoint.part import PartMarks, PartValues, SavedParts
from shoestring.checkpoint.snapshot import Snapshot
from shoestring.server.desk import Desk
from shoestring.server.holding import Holding
from shoestring.server.ledger import Mark, PushLedger


def values_of(holding: Holding) -> PartValues:
    """The arrays of a part that a checkpoint holds."""
    history = holding.history
    return PartValues(
        index=holding.part.index,
        params=holding.params,
        feedback=holding.kept,
        steps=holding.steps,
        optimizer=holding.state,
        statistics={history.digest: history.sums} if history.layers else {},
    )


def marks_of(desk: Desk) -> PartMarks:
    """How far a part has come, as its finished rounds left it."""
    ledger = {str(worker): (mark.incarnation, mark.seq) for worker, mark in desk.ledger.marks().items()}
    return PartMarks(desk.version, desk.round, desk.holding.kept is not None, ledger)


def restorer(snapshot: Snapshot) -> Callable[[Holding], tuple[int, PushLedger]]:
    """Return what fills a part from a checkpoint, whichever file holds it, and gives its round and ledger."""
    saved = SavedParts(snapshot)

    def restore(holding: Holding) -> tuple[int, PushLedger]:
        marks = saved.marks(holding.part.index)
        if marks.has_kept:
            holding.kept = np.zeros_like(holding.params)
        saved.fill(values_of(holding))
        holding.version = marks.version
        ledger = {int(worker): Mark(*mark) for worker, mark in marks.ledger.items()}
        return marks.round, PushLedger(ledger)

    return restore
