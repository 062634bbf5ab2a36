"""Write a shard's file of a checkpoint while rounds go on.

A part is copied when its round is finished, before its next one begins, and written by a
thread of its own. At most a few parts wait to be written, so a slow disk slows rounds
down rather than filling the memory. A file appears when all parts of the shard are in it, or not
at all; `on_written` hears of every round once, in the writer's thread.
"""

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from shoestring.checkpoint.part import PartMarks, PartValues, Tensors
from shoestring.checkpoint.snapshot import TensorFileWriter, step_folder

_WAITING = 4  # parts copied and not yet written
_OPEN = 8  # checkpoints whose file is begun; one that lacks a part for long will never have it
_REMEMBERED = 64  # checkpoints whose file is finished or given up

Specs = dict[str, tuple[np.dtype[Any], tuple[int, ...]]]


class ShardWriter:
    """Writes `shard-INDEX.safetensors` into the folder of each checkpoint."""

    def __init__(self, root: Path, index: int) -> None:
        self.root = root
        self.index = index
        self.on_written: Callable[[int, bytes | None, str], None] = lambda seq, record, why: None
        self._specs: Specs = {}
        self._queue: queue.Queue[tuple[int, Tensors, dict[str, Any]] | None] = queue.Queue(_WAITING)
        self._thread = threading.Thread(target=self._write_all, name="shard-writer", daemon=True)
        self._thread.start()

    def capture(self, seq: int, values: PartValues, marks: PartMarks, every: Iterable[PartValues]) -> None:
        """Copy one part as it is after round `seq`; `every` are all parts the file will hold."""
        if not self._specs:  # a shard's parts are settled once
            self._specs = {
                name: (array.dtype, array.shape) for part in every for name, array in part.tensors().items()
            }
        copies = {name: array.copy() for name, array in values.tensors().items()}
        self._queue.put((seq, copies, {str(values.index): msgspec.to_builtins(marks)}))

    def close(self) -> None:
        """Finish what was captured, and stop."""
        self._queue.put(None)
        self._thread.join()

    def _write_all(self) -> None:
        files: dict[int, tuple[TensorFileWriter, dict[str, Any]]] = {}
        ended: deque[int] = deque(maxlen=_REMEMBERED)
        while (item := self._queue.get()) is not None:
            seq, tensors, facts = item
            # Workers that do not wait for each other have a part saved one by one: the first counts.
            if seq in ended or (seq in files and facts.keys() <= files[seq][1].keys()):
                continue
            try:
                if seq not in files:
                    folder = step_folder(self.root, seq)
                    folder.mkdir(parents=True, exist_ok=True)
                    path = folder / f"shard-{self.index}.safetensors"
                    files[seq] = (TensorFileWriter(path, self._specs), {})
                    if len(files) > _OPEN:
                        oldest = min(files.keys() - {seq})
                        files.pop(oldest)[0].abandon()
                        ended.append(oldest)
                        self.on_written(oldest, None, "some of its parts never came")
                writer, known = files[seq]
                for name, values in tensors.items():
                    writer.write(name, values)
                known.update(facts)
                if writer.is_complete:
                    record = writer.finish({"parts": known})
                    del files[seq]
                    ended.append(seq)
                    self.on_written(seq, msgspec.json.encode(record), "")
            except Exception as error:  # whatever it is, rounds must not wait for this thread for ever
                if seq in files:
                    files.pop(seq)[0].abandon()
                ended.append(seq)
                self.on_written(seq, None, str(error))
        for writer, _ in files.values():
            writer.abandon()
