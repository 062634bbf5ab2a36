"""The files of checkpoints that are being written, as one shard hears of them.

Workers report their files to the first shard. Every shard tells the first worker, which
completes the checkpoint, of its own file; the first shard adds those of the workers.

A round is reported once, with its files or as given up. A record of it that comes later, or again,
opens nothing. Memory is bounded: records are gathered of `CHECKPOINT_LIMIT` rounds, and as many
reports are remembered.
"""

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

import msgspec

from shoestring.checkpoint.tensorfile import FileRecord
from shoestring.errors import WireError

RECORD_LIMIT = 4 << 20  # bytes
CHECKPOINT_LIMIT = 4  # at once; the oldest is given up
_SETTLED_LIMIT = 64  # rounds that are known to have been reported
_OVERTAKEN = "files of later checkpoints came before all of its own"


@dataclass
class _Files:
    own: bytes | None = None
    workers: dict[int, bytes] = field(default_factory=dict)


class Records:
    """What is known of each checkpoint, by its round."""

    def __init__(self, *, waits_for_workers: bool) -> None:
        self._waits_for_workers = waits_for_workers
        self._files: dict[int, _Files] = {}
        self._reported: dict[int, tuple[bytes, str]] = {}  # the last: files, or why there are none
        self._settled: deque[int] = deque(maxlen=_SETTLED_LIMIT)

    def __len__(self) -> int:
        return len(self._files)

    def add_own(self, seq: int, record: bytes) -> None:
        """Note this shard's file."""
        files = self._at(seq)
        if files is not None:
            files.own = record

    def add(self, worker: int, seq: int, record: memoryview) -> None:
        """Note a worker's file; a record that is none is refused."""
        if record.nbytes > RECORD_LIMIT or not self._waits_for_workers:
            raise WireError("a record of a file that nobody asked for", hint="check both sides' versions")
        try:
            msgspec.json.decode(record, type=FileRecord)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise WireError(
                f"the record of a file cannot be read: {error}", hint="check both sides' versions"
            ) from None
        files = self._at(seq)
        if files is not None:
            files.workers[worker] = bytes(record)

    def give_up(self, seq: int, why: str) -> None:
        """Forget a checkpoint whose file could not be written."""
        self._files.pop(seq, None)
        self._report(seq, b"", why)

    def reported(self, seq: int) -> tuple[bytes, str] | None:
        """What was reported of a checkpoint: its files, or why there are none; `None`: nothing yet."""
        return self._reported.get(seq)

    def complete(self, workers: Collection[int]) -> list[tuple[int, bytes]]:
        """Take out the (round, records as a JSON list) that lack no file of this shard and these workers."""
        done = []
        for seq, files in sorted(self._files.items()):
            is_missing = self._waits_for_workers and any(worker not in files.workers for worker in workers)
            if files.own is None or is_missing:
                continue
            records = [files.own, *(files.workers[worker] for worker in sorted(files.workers))]
            done.append((seq, msgspec.json.encode([msgspec.Raw(record) for record in records])))
            self._report(seq, done[-1][1], "")
            del self._files[seq]
        return done

    def _report(self, seq: int, files: bytes, why: str) -> None:
        self._settled.append(seq)
        self._reported[seq] = (files, why)
        if len(self._reported) > CHECKPOINT_LIMIT:
            del self._reported[next(iter(self._reported))]

    def _at(self, seq: int) -> _Files | None:
        """The files of a round that was not reported yet."""
        if seq in self._settled:
            return None
        files = self._files.setdefault(seq, _Files())
        if len(self._files) > CHECKPOINT_LIMIT:
            self.give_up(min(key for key in self._files if key != seq), _OVERTAKEN)
        return files
