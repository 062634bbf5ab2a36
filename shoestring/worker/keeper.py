"""A worker's part of a checkpoint: what the shards do not know.

Buffers (BatchNorm's statistics), what pushes left out, random states, the place in the
data, the state of a local optimizer, learning rates, and whatever was given to `keep`.

It is taken in two moments: the values when the round ends, the schedulers when the next
step begins, because a script moves them on in between. The file is written by a thread
while training goes on. The first worker writes the manifest, when all files are there.
"""

import threading
import time
from collections.abc import Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from shoestring.checkpoint.owner import owned, read_owner
from shoestring.checkpoint.snapshot import (
    FileRecord,
    Manifest,
    Snapshot,
    TensorFileWriter,
    commit,
    prune,
    step_folder,
)
from shoestring.errors import ShoestringError, SnapshotError, UsageError
from shoestring.model.table import Table
from shoestring.worker import session
from shoestring.worker.courier import Courier
from shoestring.worker.randomness import random_state, restore_random
from shoestring.worker.session import Session

Tensors = dict[str, NDArray[Any]]
_CLOSE_S = 60.0  # how long the end of a run waits for its last checkpoint


class Stateful(Protocol):
    """What `keep` takes: a learning-rate scheduler, for example."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


class Keeper:
    """Saves one worker's state every so many rounds, and completes checkpoints if it is the first."""

    def __init__(
        self,
        here: Session,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        courier: Courier,
        table: Table,
        *,
        shards: int,
        is_local: bool,
    ) -> None:
        self._here = here
        self._model = model
        self._optimizer = optimizer
        self._courier = courier
        self._table = table
        self._shards = shards  # that hold a part: the others write nothing
        self._is_local = is_local  # the optimizer's state is here, not on the shards
        self._taken: tuple[int, int, Tensors, dict[str, Any]] | None = None
        self._writers: list[threading.Thread] = []
        self._records: dict[int, list[FileRecord]] = {}
        self._reports: dict[int, int] = {}
        self._steps: dict[int, int] = {}
        self._owner = "" if self._root is None else read_owner(self._root)
        self._settled = 0  # the last checkpoint that was completed or given up

    def round_ended(self, seq: int, steps: int) -> None:
        """Take the values of a round that is to be saved."""
        self._complete()
        if self._here.run.every <= 0 or seq % self._here.run.every or self._root is None:
            return
        tensors, random_facts = random_state()
        for name, tensor in self._untrained().items():
            tensors[f"buffer.{name}"] = tensor.detach().cpu().numpy().copy()
        tensors |= self._courier.kept()
        facts: dict[str, Any] = {"random": random_facts, "steps": steps}
        if self._is_local:
            tensors |= _optimizer_tensors(self._optimizer)
        position = self._here.position()
        facts["position"] = [position[0], position[1]]
        facts["shares"] = self._here.sharing.state()
        self._steps[seq] = steps
        self._taken = (seq, steps, tensors, facts)

    def step_begins(self) -> None:
        """Take the schedulers of the round before, and write."""
        if self._taken is None:
            return
        (seq, _, tensors, facts), self._taken = self._taken, None
        facts["groups"] = [_plain_group(group) for group in self._optimizer.param_groups]
        facts["kept"] = [_as_data(item.state_dict()) for item in self._here.kept]
        thread = threading.Thread(target=self._write, args=(seq, tensors, facts), name="keeper")
        thread.start()
        self._writers = [*(t for t in self._writers if t.is_alive()), thread]

    def close(self) -> None:
        """Finish what was begun: the run's last checkpoint is complete when this returns, or given up."""
        self.step_begins()
        for thread in self._writers:
            thread.join(_CLOSE_S)
        deadline = time.monotonic() + _CLOSE_S
        while self._here.run.worker == 0 and self._steps and time.monotonic() < deadline:
            if not self._complete():
                self._courier.exchange.wait_snapped(0.2)

    def load(self, snapshot: Snapshot) -> None:
        """Go on from a checkpoint. The shards have restored theirs."""
        self._refuse_other_model(snapshot)
        prefix = f"worker.{self._here.run.worker}."
        facts = _worker_facts(snapshot, self._here.run.worker)
        if facts is None:
            return  # a worker that was not there: it starts with fresh random states and nothing kept
        names = [name for name in snapshot.names() if name.startswith(prefix)]
        tensors = {name.removeprefix(prefix): snapshot.read(name) for name in names}
        buffers = self._untrained()
        with torch.no_grad():
            for name, values in tensors.items():
                if name.startswith("buffer."):
                    buffer = buffers.get(name.removeprefix("buffer."))
                    if buffer is None or tuple(buffer.shape) != values.shape:
                        raise SnapshotError(
                            f"`{name}` of `{snapshot.folder}` does not fit the model",
                            hint="resume with the model and the version that the checkpoint was made with",
                        )
                    buffer.copy_(torch.from_numpy(values))
        self._courier.load_kept(tensors)
        for group, saved in zip(self._optimizer.param_groups, facts["groups"], strict=True):
            group.update({k: tuple(v) if isinstance(v, list) else v for k, v in saved.items()})
        if self._is_local:
            _load_optimizer(self._optimizer, tensors)
        randoms = {name: v for name, v in tensors.items() if name.startswith("random.")}
        self._here.resumed_random = (randoms, facts["random"])
        self._here.resumed_position = (int(facts["position"][0]), int(facts["position"][1]))
        self._here.resumed_kept = list(facts["kept"])
        self._here.sharing.load(facts.get("shares", []))
        restore_random(self._here)

    def _refuse_other_model(self, snapshot: Snapshot) -> None:
        for own, saved in zip_longest(self._table_facts(), snapshot.manifest.facts.get("table", [])):
            if own != saved:
                raise SnapshotError(
                    f"checkpoint `{snapshot.folder}` has {saved} where this model has {own}",
                    hint="resume with the model and the version that the checkpoint was made with",
                )

    def _table_facts(self) -> list[list[Any]]:
        return [[tensor.name, list(tensor.shape), tensor.group] for tensor in self._table.tensors]

    def _untrained(self) -> dict[str, torch.Tensor]:
        """Buffers and frozen parameters, by name."""
        trained = {tensor.name for tensor in self._table.tensors}
        frozen = {
            name: parameter for name, parameter in self._model.named_parameters() if name not in trained
        }
        return frozen | dict(self._model.named_buffers())

    def _aliases(self) -> dict[str, str]:
        """The further names of parameters that several modules share."""
        names = {parameter: name for name, parameter in self._model.named_parameters()}
        every = self._model.named_parameters(remove_duplicate=False)
        return {name: names[parameter] for name, parameter in every if names[parameter] != name}

    @property
    def _root(self) -> Path | None:
        return self._here.run.checkpoint

    def _write(self, seq: int, tensors: Tensors, facts: dict[str, Any]) -> None:
        assert self._root is not None
        worker = self._here.run.worker
        named = {f"worker.{worker}.{name}": values for name, values in tensors.items()}
        try:
            folder = step_folder(self._root, seq)
            folder.mkdir(parents=True, exist_ok=True)
            specs = {name: (values.dtype, values.shape) for name, values in named.items()}
            with TensorFileWriter(folder / f"worker-{worker}.safetensors", specs) as writer:
                for name, values in named.items():
                    writer.write(name, values)
                record = writer.finish({"worker": worker, **facts})
            self._courier.exchange.send_record(seq, msgspec.json.encode(record))
        except (ShoestringError, OSError) as error:
            self._give_up(seq, str(error))

    def _complete(self) -> bool:
        """Take in reports; write the manifest of checkpoints that are whole. True if any came."""
        came = False
        for message, payload in self._courier.exchange.poll_snapped():
            came = True
            seq = message.round
            if message.error:
                self._give_up(seq, message.error)
                continue
            if seq <= self._settled:
                continue
            # A shard may be done before this worker has ended the round.
            records = self._records.setdefault(seq, [])
            records += msgspec.json.decode(payload, type=list[FileRecord])
            self._reports[seq] = self._reports.get(seq, 0) + 1
        for seq in [seq for seq in self._steps if self._reports.get(seq) == self._shards]:
            self._commit(seq)
        return came

    def _commit(self, seq: int) -> None:
        assert self._root is not None
        run = self._here.run
        manifest = Manifest(
            step=seq,
            workers=run.workers,
            shards=self._shards,
            facts={"table": self._table_facts(), "aliases": self._aliases(), "steps": self._steps.pop(seq)},
            files=sorted(self._records.pop(seq), key=lambda record: record.name),
        )
        del self._reports[seq]
        self._settled = max(self._settled, seq)
        folder = step_folder(self._root, seq)
        try:
            with owned(self._root, self._owner):
                commit(folder, manifest)
                prune(self._root, keep=run.retain)
        except (ShoestringError, OSError) as error:
            self._give_up(seq, str(error))
            return
        self._here.log.write("checkpoint", step=seq, folder=str(folder))

    def _give_up(self, seq: int, why: str) -> None:
        self._settled = max(self._settled, seq)
        self._steps.pop(seq, None)
        self._records.pop(seq, None)
        self._reports.pop(seq, None)
        self._here.notice(f"checkpoint {seq} was not written, training goes on: {why}")


def keep(item: Stateful) -> None:
    """Save something with every checkpoint, and restore it now if this run was resumed.

    For learning-rate schedulers and whatever else has `state_dict` and `load_state_dict`
    of plain data. Call it after `wrap`, in the same order in every process.
    """
    here = session.current()
    place = len(here.kept)
    here.kept.append(item)
    if place < len(here.resumed_kept):
        item.load_state_dict(here.resumed_kept[place])


def _worker_facts(snapshot: Snapshot, worker: int) -> dict[str, Any] | None:
    for file in snapshot.manifest.files:
        if file.facts and file.facts.get("worker") == worker:
            return dict(file.facts)
    return None


def _as_data(state: Mapping[str, Any]) -> dict[str, Any]:
    data = {key: value for key, value in state.items() if not callable(value)}
    try:
        if msgspec.json.decode(msgspec.json.encode(data)) == data:
            return data
    except (TypeError, msgspec.MsgspecError):
        pass
    raise UsageError(
        f"the state of something given to `keep` is not plain data: {sorted(data)}",
        hint="keep numbers, texts, lists and dictionaries with text keys",
    )


def _plain_group(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group's numbers: what schedulers change, and what they remember there."""
    plain: dict[str, Any] = {}
    for name, value in group.items():
        if isinstance(value, bool | int | float):
            plain[name] = value
        elif isinstance(value, tuple) and all(isinstance(item, int | float) for item in value):
            plain[name] = list(value)
    return plain


def _optimizer_tensors(optimizer: torch.optim.Optimizer) -> Tensors:
    tensors: Tensors = {}
    for index, state in optimizer.state_dict()["state"].items():
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                tensors[f"optimizer.{index}.{name}"] = value.detach().cpu().numpy().copy()
            elif isinstance(value, int | float):
                tensors[f"optimizer.{index}.{name}"] = np.array(value, np.float64)
    return tensors


def _load_optimizer(optimizer: torch.optim.Optimizer, tensors: Tensors) -> None:
    state: dict[int, dict[str, torch.Tensor]] = {}
    for name, values in tensors.items():
        if name.startswith("optimizer."):
            _, index, key = name.split(".", 2)
            state.setdefault(int(index), {})[key] = torch.from_numpy(values.copy())
    whole = optimizer.state_dict()
    whole["state"] = state
    optimizer.load_state_dict(whole)
