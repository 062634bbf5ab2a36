"""What a shard saves of a part, and how a part goes on from a checkpoint.

The checkpoint's side, names and files, is in `checkpoint.part`; here a `PartRounds` and its `Holding`
are described in its terms.
"""

from collections.abc import Callable

from shoestring.checkpoint.part import PartMarks, PartValues, SavedParts
from shoestring.checkpoint.snapshot import Snapshot
from shoestring.server.holding import Holding
from shoestring.server.ledger import Mark, PushLedger
from shoestring.server.masters import MasterHolding
from shoestring.server.rounds import PartRounds


def values_of(holding: Holding) -> PartValues:
    """The arrays of a part that a checkpoint holds."""
    history = holding.history
    return PartValues(
        index=holding.part.index,
        params=holding.params,
        feedback=holding.feedback,
        held=holding.values if isinstance(holding, MasterHolding) else None,
        steps=holding.steps,
        optimizer=holding.state,
        statistics={history.digest: history.sums} if history.layers else {},
    )


def marks_of(rounds: PartRounds) -> PartMarks:
    """How far a part has come, as its finished rounds left it."""
    ledger = {str(worker): (mark.incarnation, mark.seq) for worker, mark in rounds.ledger.marks().items()}
    return PartMarks(rounds.version, rounds.round, rounds.holding.has_feedback, ledger)


def restorer(snapshot: Snapshot) -> Callable[[Holding], tuple[int, PushLedger]]:
    """Return what fills a part from a checkpoint, whichever file holds it, and gives its round and ledger."""
    saved = SavedParts(snapshot)

    def restore(holding: Holding) -> tuple[int, PushLedger]:
        marks = saved.marks(holding.part.index)
        if marks.has_kept:
            holding.begin_feedback()
        saved.fill(values_of(holding))
        holding.version, holding.has_values = marks.version, True
        ledger = {int(worker): Mark(*mark) for worker, mark in marks.ledger.items()}
        return marks.round, PushLedger(ledger)

    return restore
