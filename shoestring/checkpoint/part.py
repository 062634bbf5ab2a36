"""One part of the model as a checkpoint holds it: which tensors, under which names, and its marks.

A part's values, optimizer state, feedback, round and ledger lie in one file: restoring one without
the other would apply or lose a push. The names say nothing about shards, so that a part can be
restored on another number of them.

A shard describes a part with `PartValues`, whose arrays are its own memory, and `PartMarks`. The
same two serve both ways: `ShardWriter` copies from the arrays, `SavedParts.fill` writes into them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from shoestring.checkpoint.snapshot import Snapshot
from shoestring.errors import SnapshotError

Tensors = dict[str, NDArray[Any]]
_OTHER_MODEL = "resume with the model and the version that the checkpoint was made with"


def tensor_name(part: int, field: str) -> str:
    """Name one tensor of a part, the same in every checkpoint."""
    return f"part.{part:05d}.{field}"


@dataclass(frozen=True)
class PartValues:
    """The arrays of one part: the shard's own, not copies."""

    index: int
    params: NDArray[np.float32]
    feedback: NDArray[np.float32] | None  # of replies: what workers lack of `params`' updates
    steps: NDArray[np.int64]  # updates of each piece so far
    optimizer: Mapping[str, NDArray[np.float32]]
    held: NDArray[np.float32] | None = None  # by workers, where that is less precise than `params`
    # BatchNorm statistics, under a digest of the layers: other layers have another name.
    statistics: Mapping[str, NDArray[Any]] = field(default_factory=dict)

    def tensors(self) -> Tensors:
        """All arrays by their names in a checkpoint; where there may be feedback and is none, zeros."""
        return self._required() | self._optional()

    def _required(self) -> Tensors:
        kept = self.feedback if self.feedback is not None else np.zeros_like(self.params)
        arrays: Tensors = {
            "params": self.params,
            **({"kept": kept} if self.held is None else {"held": self.held}),
            "steps": self.steps,
            **{f"state.{name}": vector for name, vector in self.optimizer.items()},
        }
        return {tensor_name(self.index, field): array for field, array in arrays.items()}

    def _optional(self) -> Tensors:
        return {
            tensor_name(self.index, f"statistics.{digest}"): sums for digest, sums in self.statistics.items()
        }


class PartMarks(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How far a part has come. The fields are named as in the file."""

    version: int
    round: int
    has_kept: bool  # whether there is feedback, or `held` is not `params` rounded: zeros are not none
    ledger: dict[str, tuple[int, int]]  # by worker: incarnation and last push that was applied


class SavedParts:
    """The parts of a checkpoint, whichever file holds each."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._marks = {
            part: marks
            for file in snapshot.manifest.files
            for part, marks in (file.facts or {}).get("parts", {}).items()
        }

    def marks(self, part: int) -> PartMarks:
        """Return a part's marks; raise `SnapshotError` where there are none that make sense."""
        try:
            marks = msgspec.convert(self._marks.get(str(part)), PartMarks)
            for worker in marks.ledger:
                int(worker)
        except ValueError as error:  # msgspec's errors are `ValueError`s, too
            raise _unfit(f"checkpoint `{self._snapshot.folder}` has no usable part {part}: {error}") from None
        return marks

    def fill(self, values: PartValues) -> None:
        """Overwrite a part's arrays with those of the checkpoint.

        Statistics of layers that the checkpoint does not have stay as they are.
        """
        optional = values._optional()
        tensors = values._required() | {
            name: array for name, array in optional.items() if self._snapshot.has(name)
        }
        for name, array in tensors.items():
            found = self._snapshot.spec(name)
            if found != (array.dtype.name, array.shape):
                raise _unfit(
                    f"`{name}` in `{self._snapshot.folder}` is {found}, expected {array.dtype} {array.shape}"
                )
        for name, array in tensors.items():
            array[:] = self._snapshot.read(name)


def _unfit(what: str) -> SnapshotError:
    return SnapshotError(what, hint=_OTHER_MODEL)
