"""Decide which checkpoint a run goes on from: the newest undamaged one, a given one, or none.

A checkpoint is chosen before any process starts, so that all go on from the same one, and only
after every byte of it was checked. One that was passed over is named, with the reason. A fresh run
never writes over the checkpoints of an earlier one.
"""

from collections.abc import Callable
from pathlib import Path

from shoestring.checkpoint.owner import take_over
from shoestring.checkpoint.snapshot import MANIFEST, Snapshot, newest
from shoestring.errors import SnapshotError, UsageError

AUTO, NO = "auto", "no"


def begin(wanted: str, checkpoint: Path | None, say: Callable[[str], None]) -> Path | None:
    """Make the folder of checkpoints this run's own, then `choose`."""
    if wanted == NO:
        choose(wanted, checkpoint, say)  # which may refuse; the folder is another run's then
    if checkpoint is not None:
        take_over(checkpoint)
    return choose(wanted, checkpoint, say)


def choose(wanted: str, checkpoint: Path | None, say: Callable[[str], None]) -> Path | None:
    """Turn `auto`, `no` or a folder into the checkpoint to go on from, telling what was decided.

    `auto` takes the newest undamaged one of `checkpoint`, and none where there is none.
    """
    if wanted == NO:
        if checkpoint is not None and newest(checkpoint, verify=False)[0] is not None:
            raise UsageError(
                f"`{checkpoint}` holds checkpoints of an earlier run, which a fresh one would write over",
                hint="give another `--checkpoint`, or go on from them with `--resume auto`",
            )
        return None
    if wanted == AUTO:
        if checkpoint is None:
            return None
        snapshot, passed_over = newest(checkpoint)
        for error in passed_over:
            say(f"passed over a checkpoint: {error.message}")
        if snapshot is None:
            say(f"no checkpoint in {checkpoint}: starting fresh")
            return None
    else:
        snapshot = find_snapshot(Path(wanted), say)
    say(f"going on from step {snapshot.manifest.step}, {snapshot.folder}")
    return snapshot.folder.absolute()


def find_snapshot(folder: Path, say: Callable[[str], None] = lambda text: None) -> Snapshot:
    """Open the checkpoint in `folder`, or the newest undamaged one of those below it.

    Every byte is checked.
    """
    if (folder / MANIFEST).exists():
        snapshot = Snapshot(folder)
        snapshot.verify()
        return snapshot
    if not folder.is_dir():
        raise SnapshotError(f"there is no folder `{folder}`", hint="give a checkpoint, or a folder of them")
    found, passed_over = newest(folder)
    for error in passed_over:
        say(f"passed over a checkpoint: {error.message}")
    if found is None:
        raise (
            passed_over[0]
            if passed_over
            else SnapshotError(
                f"there is no checkpoint in `{folder}`",
                hint="give a checkpoint, or the folder given to `--checkpoint`",
            )
        )
    return found
