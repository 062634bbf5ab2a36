"""Write a shard's file of a checkpoint while rounds go on.

A part is copied when its round is finished, before its next one begins, and written by a
thread of its own. At most a few parts wait to be written, so a slow disk slows rounds
down rather than filling the memory. A part's values, state, feedback, round and ledger go
into one file together: restoring one without the other would apply or lose a push.
"""

import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from shoestring.checkpoint.snapshot import Snapshot, TensorFileWriter, step_folder
from shoestring.errors import SnapshotError
from shoestring.server.desk import Desk
from shoestring.server.holding import Holding
from shoestring.server.ledger import Mark, PushLedger

_WAITING = 4  # parts copied and not yet written
_REMEMBERED = 64  # checkpoints whose file is finished or given up

Tensors = dict[str, NDArray[Any]]
Specs = dict[str, tuple[np.dtype[Any], tuple[int, ...]]]


class _Fact(msgspec.Struct, forbid_unknown_fields=True):
    """What goes with a part's tensors."""

    version: int
    round: int
    has_kept: bool
    ledger: dict[str, tuple[int, int]]


class Archive:
    """Writes `shard-INDEX.safetensors` into the folder of each checkpoint."""

    def __init__(self, root: Path, index: int) -> None:
        self.root = root
        self.index = index
        self.on_written: Callable[[int, bytes | None, str], None] = lambda seq, record, why: None
        self._specs: Specs = {}
        self._queue: queue.Queue[tuple[int, Tensors, dict[str, Any]] | None] = queue.Queue(_WAITING)
        self._thread = threading.Thread(target=self._write_all, name="archive", daemon=True)
        self._thread.start()

    def capture(self, seq: int, desk: Desk, desks: Mapping[int, Desk]) -> None:
        """Copy one part as it is after round `seq`; `desks` are all parts the file will hold."""
        if not self._specs:  # a shard's parts are settled once
            self._specs = {
                name: (array.dtype, array.shape)
                for other in desks.values()
                for name, array in (_tensors(other.holding) | _statistics(other.holding)).items()
            }
        own = _tensors(desk.holding) | _statistics(desk.holding)
        copies = {name: array.copy() for name, array in own.items()}
        facts = {str(desk.holding.part.index): msgspec.to_builtins(_fact(desk))}
        self._queue.put((seq, copies, facts))

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


def restorer(snapshot: Snapshot) -> Callable[[Holding], tuple[int, PushLedger]]:
    """Return what fills a part from a checkpoint, whichever file holds it, and gives its round and ledger."""
    facts = {
        part: fact
        for file in snapshot.manifest.files
        for part, fact in (file.facts or {}).get("parts", {}).items()
    }

    def restore(holding: Holding) -> tuple[int, PushLedger]:
        part = holding.part.index
        try:
            fact = msgspec.convert(facts.get(str(part)), _Fact)
            ledger = PushLedger({int(worker): Mark(*mark) for worker, mark in fact.ledger.items()})
        except ValueError as error:  # msgspec's errors are `ValueError`s, too
            raise _unfit(f"checkpoint `{snapshot.folder}` has no usable part {part}: {error}") from None
        if fact.has_kept:
            holding.kept = np.zeros_like(holding.params)
        tensors = _tensors(holding)
        for name, array in tensors.items():
            _check_spec(snapshot, name, array)
        for name, array in _statistics(holding).items():
            if snapshot.has(name):  # else the layers are other ones: their history begins anew
                _check_spec(snapshot, name, array)
                tensors[name] = array
        for name, array in tensors.items():
            array[:] = snapshot.read(name)
        holding.version = fact.version
        return fact.round, ledger

    return restore


def _check_spec(snapshot: Snapshot, name: str, array: NDArray[Any]) -> None:
    found = snapshot.spec(name)
    if found != (array.dtype.name, array.shape):
        raise _unfit(f"`{name}` in `{snapshot.folder}` is {found}, expected {array.dtype} {array.shape}")


def _unfit(what: str) -> SnapshotError:
    return SnapshotError(what, hint="resume with the model and the version that the checkpoint was made with")


def _prefix(holding: Holding) -> str:
    return f"part.{holding.part.index:05d}"


def _tensors(holding: Holding) -> Tensors:
    prefix = _prefix(holding)
    kept = holding.kept if holding.kept is not None else np.zeros_like(holding.params)
    return {
        f"{prefix}.params": holding.params,
        f"{prefix}.kept": kept,
        f"{prefix}.steps": holding.steps,
        **{f"{prefix}.state.{name}": vector for name, vector in holding.state.items()},
    }


def _statistics(holding: Holding) -> Tensors:
    """What its layers have seen, under a name that other layers do not have; nothing without layers."""
    if not holding.history.layers:
        return {}
    return {f"{_prefix(holding)}.statistics.{holding.history.digest}": holding.history.sums}


def _fact(desk: Desk) -> _Fact:
    ledger = {str(worker): (mark.incarnation, mark.seq) for worker, mark in desk.ledger.marks().items()}
    return _Fact(desk.version, desk.round, desk.holding.kept is not None, ledger)
