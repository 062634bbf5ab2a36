"""When a checkpoint is complete: every shard that holds a part has reported its file.

The first shard's report has the files of all workers as well. Shards report to the first worker that
is there, which writes the manifest, whereby a checkpoint is complete, and removes old ones.

A report may come before the worker itself has ended the round, more than once, or never. Completing
a checkpoint settles all earlier rounds, as `prune` removes what they left: no round is waited for
that cannot become a checkpoint any more.
"""

from collections import deque
from pathlib import Path
from typing import Any

from shoestring.checkpoint.owner import owned, read_owner
from shoestring.checkpoint.snapshot import FileRecord, Manifest, commit, prune, step_folder

_SHARD = "shard-"  # what names of shards' files begin with
_OPEN = 4  # rounds that are waited for at once; shards gather the records of as many
_REMEMBERED = 64  # rounds that were given up


class Completion:
    """Gathers the files of checkpoints, and completes those that have all. Not thread-safe."""

    def __init__(self, root: Path, *, workers: int, shards: int, retain: int) -> None:
        self._root = root
        self._workers = workers
        self._shards = shards  # that hold a part: the others write nothing
        self._retain = retain  # complete checkpoints that stay
        self._owner = read_owner(root)
        self._steps: dict[int, int] = {}  # of the optimizer, by the rounds that are waited for
        self._files: dict[int, dict[str, FileRecord]] = {}  # that were reported, by their names
        self._completed = 0  # the last round whose checkpoint is complete
        self._given_up: deque[int] = deque(maxlen=_REMEMBERED)

    @property
    def is_waiting(self) -> bool:
        """Whether any checkpoint that is expected lacks files."""
        return bool(self._steps)

    def expect(self, seq: int, steps: int) -> list[int]:
        """Wait for the files of a round, after so many steps; return the rounds given up for it."""
        if self._is_settled(seq):
            return []
        self._steps[seq] = steps
        overtaken = sorted(self._steps)[:-_OPEN]
        for earlier in overtaken:
            self.give_up(earlier)
        return overtaken

    def report(self, seq: int, files: list[FileRecord]) -> None:
        """Take in what a shard reports of a round."""
        if not self._is_settled(seq):
            self._files.setdefault(seq, {}).update({file.name: file for file in files})
        while len(self._files) > 2 * _OPEN:  # of rounds that this worker did not take part in
            del self._files[min(self._files)]

    def give_up(self, seq: int) -> bool:
        """Wait for a round no longer; say whether it was neither complete nor given up before."""
        self._steps.pop(seq, None)
        self._files.pop(seq, None)
        is_new = not self._is_settled(seq)
        if is_new:
            self._given_up.append(seq)
        return is_new

    def first_whole(self) -> int | None:
        """The earliest round that is waited for and lacks no file."""
        whole = (seq for seq in self._steps if self._count_shards(seq) == self._shards)
        return min(whole, default=None)

    def complete(self, seq: int, facts: dict[str, Any]) -> tuple[Path, list[int]]:
        """Make a checkpoint complete; return its folder, and the earlier rounds given up by that.

        `facts` go into the manifest. Raises what keeps it from being written; the round then still
        has to be given up.
        """
        files = self._files[seq]
        manifest = Manifest(
            step=seq,
            workers=self._workers,
            shards=self._shards,
            facts={**facts, "steps": self._steps[seq]},
            files=sorted(files.values(), key=lambda record: record.name),
        )
        folder = step_folder(self._root, seq)
        with owned(self._root, self._owner):
            commit(folder, manifest)
            prune(self._root, self._retain)
        self._completed = max(self._completed, seq)
        overtaken = sorted(earlier for earlier in self._steps if earlier < seq)
        self._steps = {later: steps for later, steps in self._steps.items() if later > seq}
        self._files = {later: held for later, held in self._files.items() if later > seq}
        return folder, overtaken

    def _is_settled(self, seq: int) -> bool:
        return seq <= self._completed or seq in self._given_up

    def _count_shards(self, seq: int) -> int:
        return sum(name.startswith(_SHARD) for name in self._files.get(seq, ()))
