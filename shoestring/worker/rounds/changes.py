"""What a script has set of a model since the last round: parameters, and the optimizer's state.

All workers set the same, and say so in the commit of the next round; the first one brings the values.
"""

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
from numpy.typing import NDArray

from shoestring.codec.base import Vector
from shoestring.errors import UsageError
from shoestring.model.parts import pack_flags
from shoestring.model.vectors import PARAMS, Vectors, pack
from shoestring.wire import messages as say
from shoestring.wire.messages import WHOLE_ROUND
from shoestring.worker.coder import Terms
from shoestring.worker.protocol.worker import Give
from shoestring.worker.replica.replica import Replica
from shoestring.worker.rounds.state import ShardState


class Changes:
    """Finds what a script has set of one replica, and gives it to the shards."""

    def __init__(
        self, replica: Replica, state: ShardState, notice: Callable[[str], None], *, is_first: bool
    ) -> None:
        self._replica = replica
        self._state = state
        self._notice = notice
        self._is_first = is_first
        self._steps = 0  # before which parameters were changed
        replica.note()

    def commit(self, terms: Terms, *, is_late: bool) -> tuple[say.Commit, Give]:
        """The commit to a round, and what gives the values; `is_late`: answers are under way."""
        changed = self._changed_parts(terms, is_late=is_late)
        is_loaded = self._state.leave(terms.seq) and (terms.bound == WHOLE_ROUND or self._is_first)
        commit = say.Commit(terms.seq, changed=pack_flags(changed), loads=is_loaded)
        # A copy: where answers are delayed the script may change them again.
        parts = [self._replica.parts[index] for index in np.flatnonzero(changed).tolist()]
        values = {part.index: self._replica.read(part) for part in parts}
        return commit, partial(self._vectors, commit, values)

    def _vectors(
        self, commit: say.Commit, values: Mapping[int, Vector], index: int
    ) -> tuple[tuple[str, ...], memoryview]:
        """What was set of a part before a round, as its commit says."""
        vectors: Vectors = {PARAMS: values[index]} if index in values else {}
        if commit.loads:
            vectors |= self._state.give(commit.seq, self._replica.parts[index])
        return tuple(vectors), pack(vectors)

    def _changed_parts(self, terms: Terms, *, is_late: bool) -> NDArray[np.bool_]:
        """The parts whose parameters have changed since the last round; raise where they must not."""
        changed = np.zeros(len(self._replica.parts), bool)
        indices = self._replica.changed()
        for index in indices:
            changed[self._replica.parts_of_parameter[index]] = True
        if indices and (is_late or terms.bound != WHOLE_ROUND):
            raise UsageError(
                f"the script has changed parameter `{self._replica.tensors[indices[0]].name}` since the last "
                "step, and with this policy updates are under way that are for its old value",
                hint='change parameters before `wrap`, or take `policy="every"`; '
                "`model = shoestring.wrap(model)` leaves them to the script",
            )
        self._steps += bool(indices)
        if indices and self._steps == 2:
            self._notice(
                f"the script changes parameters itself (`{self._replica.tensors[indices[0]].name}`): in such "
                "steps they travel to the shards and back uncompressed"
            )
        return changed
