"""What workers say when they take a step: that its pushes are all made, and whether it counts.

Gradients leave during backward, when nobody knows yet whether all of them are finite. A shard sums them
as they come, and updates no part before it has the commits of all who push to the round. So a step is
taken whole, or by no part of any shard.

A commit also tells what the script has set since the last round, which must be the same on all workers.
"""

from collections.abc import Mapping, Sequence

from shoestring.errors import UsageError
from shoestring.model.parts import is_flagged
from shoestring.model.vectors import PARAMS, state_names
from shoestring.server.holding import Holding
from shoestring.wire.messages import Commit

_KEPT = 4  # rounds of each worker: it has no more under way


class Commits:
    """The last commits of each worker, by the incarnation that said them and the round.

    Those of a former life are among them: a sum may wait for another worker's commit.
    """

    def __init__(self) -> None:
        self._known: dict[int, dict[tuple[int, int], Commit]] = {}  # by worker

    def add(self, worker: int, incarnation: int, commit: Commit) -> None:
        """Note what a worker has said; the first time counts."""
        known = self._known.setdefault(worker, {})
        known.setdefault((incarnation, commit.seq), commit)
        for key in sorted(known)[:-_KEPT]:
            del known[key]

    def of(self, worker: int, incarnation: int, seq: int) -> Commit | None:
        """What a worker has said of a round."""
        return self._known.get(worker, {}).get((incarnation, seq))


def wants_of(commits: Mapping[int, Commit], holding: Holding) -> tuple[str, ...]:
    """The vectors of a part that workers have set before a round; raise if some have and others have not."""
    index = holding.part.index
    changed = [w for w, commit in commits.items() if commit.changed and is_flagged(commit.changed, index)]
    if changed and len(changed) < len(commits):
        first, last = holding.names[0], holding.names[-1]
        where = f"`{first}`" if first == last else f"`{first}` to `{last}`"
        raise UsageError(
            f"parameters ({where}) were changed by the script on {_named(changed)} alone",
            hint="change parameters on all workers alike, between the same steps, or before `wrap`, "
            "which takes the first worker's; `model = shoestring.wrap(model)` leaves them to each worker",
        )
    loads = [worker for worker, commit in commits.items() if commit.loads]
    if loads and len(loads) < len(commits):
        raise UsageError(
            f"the optimizer's state was set on {_named(loads)} alone",
            hint="call `optimizer.load_state_dict` on all workers, between the same steps, or on the "
            "first one before `wrap`",
        )
    params = (PARAMS,) if changed else ()
    return params + (state_names(holding.rule) if loads else ())


def _named(workers: Sequence[int]) -> str:
    return f"worker{'s' if len(workers) > 1 else ''} {', '.join(map(str, workers))}"
