"""What workers say when they take a step: that its pushes are all made, and whether it counts.

Gradients leave during backward, when nobody knows yet whether all of them are finite. A shard sums them
as they come, and updates no part before it has the commits of all who push to the round. So a step is
taken whole, or by no part of any shard.
"""

from shoestring.wire.messages import Commit

_KEPT = 4  # rounds of each worker: it has no more under way


class Commits:
    """The last commits of each worker, by the incarnation that said them."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], dict[int, Commit]] = {}  # by worker and incarnation, by round

    def add(self, worker: int, incarnation: int, commit: Commit) -> None:
        """Note what a worker has said; the first time counts."""
        known = self._known.setdefault((worker, incarnation), {})
        known.setdefault(commit.seq, commit)
        for seq in sorted(known)[:-_KEPT]:
            del known[seq]

    def of(self, worker: int, incarnation: int, seq: int) -> Commit | None:
        """What a worker has said of a round."""
        return self._known.get((worker, incarnation), {}).get(seq)

    def forget_older(self, worker: int, incarnation: int) -> None:
        """Drop what former lives of a worker have said."""
        for key in [key for key in self._known if key[0] == worker and key[1] < incarnation]:
            del self._known[key]
