"""Take the state of a training script for a checkpoint, and bring it back: the part that needs torch.

Buffers, frozen parameters, random states, the state of a local optimizer, learning rates and what
was given to `keep` become a `WorkerState` of NumPy arrays and plain data, and the other way round.
What is taken is a copy: training goes on while it is written.
"""

from collections.abc import Mapping
from dataclasses import replace
from itertools import zip_longest
from typing import Any, Protocol

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from shoestring.checkpoint.saver import Feedback, Reports, Saver
from shoestring.checkpoint.schedule import schedule_for
from shoestring.checkpoint.snapshot import Snapshot
from shoestring.checkpoint.tensorfile import STAND_INS
from shoestring.checkpoint.worker import Tensors, WorkerState, read_worker
from shoestring.errors import SnapshotError, UsageError
from shoestring.model.table import Table
from shoestring.worker import session
from shoestring.worker.randomness import random_state, restore_random
from shoestring.worker.session import Session

_OTHER_MODEL = "resume with the model and the version that the checkpoint was made with"


class Stateful(Protocol):
    """What `keep` takes: a learning-rate scheduler, for example."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


class ScriptCapture:
    """Takes and restores the state of one training script; a `Saver`'s `Capture`."""

    def __init__(
        self,
        here: Session,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        feedback: Feedback,
        table: Table,
        *,
        is_local: bool,
    ) -> None:
        self._here = here
        self._model = model
        self._optimizer = optimizer
        self._feedback = feedback
        self._table = table
        self._is_local = is_local  # the optimizer's state is here, not on the shards

    def values(self, steps: int) -> WorkerState:
        """Copy what the end of a round has left, all but learning rates and schedulers."""
        return WorkerState(
            steps=steps,
            position=self._here.position(),
            places=self._here.all_places(),
            random=random_state(),
            buffers={name: _copy(tensor) for name, tensor in self._untrained().items()},
            feedback=self._feedback.state(),
            optimizer=_optimizer_tensors(self._optimizer) if self._is_local else {},
            shares=self._here.sharing.state(),
        )

    def add_schedules(self, state: WorkerState) -> None:
        """Add learning rates, and what was given to `keep`."""
        state.groups = [_plain_group(group) for group in self._optimizer.param_groups]
        state.stateful = [_as_data(item.state_dict()) for item in self._here.stateful]

    def model_facts(self) -> dict[str, Any]:
        """What the manifest says about the model: its table, and names that share a parameter."""
        return {"table": self._table_facts(), "aliases": self._aliases()}

    def restore(self, snapshot: Snapshot) -> None:
        """Go on from a checkpoint. The shards have restored theirs.

        A worker that was not there when it was made starts with fresh random states and no feedback.
        """
        self._refuse_other_model(snapshot)
        state = read_worker(snapshot, self._here.run.worker)
        if state is None:
            return
        self._load_buffers(snapshot, state.buffers)
        self._feedback.load(state.feedback)
        for group, saved in zip(self._optimizer.param_groups, state.groups, strict=True):
            group.update({k: tuple(v) if isinstance(v, list) else v for k, v in saved.items()})
        if self._is_local:
            _load_optimizer(self._optimizer, state.optimizer)
        self._here.resumed = replace(state, buffers={}, feedback={}, optimizer={})  # those are loaded
        self._here.sharing.load(state.shares)
        restore_random(self._here)

    def _load_buffers(self, snapshot: Snapshot, saved: Tensors) -> None:
        buffers = self._untrained()
        with torch.no_grad():
            for name, values in saved.items():
                buffer = buffers.get(name)
                if buffer is None or tuple(buffer.shape) != values.shape:
                    raise SnapshotError(
                        f"`buffer.{name}` of `{snapshot.folder}` does not fit the model", hint=_OTHER_MODEL
                    )
                buffer.copy_(_tensor(values))

    def _refuse_other_model(self, snapshot: Snapshot) -> None:
        for own, saved in zip_longest(self._table_facts(), snapshot.manifest.facts.get("table", [])):
            if own != saved:
                raise SnapshotError(
                    f"checkpoint `{snapshot.folder}` has {saved} where this model has {own}",
                    hint=_OTHER_MODEL,
                )

    def _table_facts(self) -> list[list[Any]]:
        rows = [[tensor.name, list(tensor.shape), tensor.group] for tensor in self._table.tensors]
        for row, tensor in zip(rows, self._table.tensors, strict=True):
            if tensor.dtype != "float32":  # that of checkpoints which say nothing
                row.append(tensor.dtype)
        return rows

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


def make_saver(here: Session, capture: ScriptCapture, reports: Reports, *, shards: int) -> Saver | None:
    """Make what saves this worker's state, if the run has a folder for checkpoints.

    `shards` is the number of those that hold a part.
    """
    run = here.run
    if run.checkpoint is None:
        return None
    return Saver(
        run.checkpoint,
        capture,
        reports,
        schedule=schedule_for(run.checkpoint, run.every),
        worker=run.worker,
        workers=run.workers,
        shards=shards,
        retain=run.retain,
        save_timeout_s=run.save_timeout_s,
        notice=here.notice,
        log=here.log.write,
    )


def keep(item: Stateful) -> None:
    """Save something with every checkpoint, and restore it now if this run was resumed.

    For learning-rate schedulers and whatever else has `state_dict` and `load_state_dict`
    of plain data. Call it after `wrap`, in the same order in every process.
    """
    here = session.current()
    place = len(here.stateful)
    here.stateful.append(item)
    if place < len(here.resumed.stateful):
        item.load_state_dict(here.resumed.stateful[place])


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


def _copy(tensor: torch.Tensor) -> Any:
    own = tensor.detach().cpu()
    stand_in = STAND_INS.get(str(own.dtype).removeprefix("torch."))
    if stand_in is None:
        return own.numpy().copy()
    bits = own.contiguous().view(torch.int16 if stand_in.itemsize == 2 else torch.uint8)
    return bits.numpy().copy().view(stand_in)


def _tensor(values: NDArray[Any]) -> torch.Tensor:
    """A copy of what `_copy` has made, as a tensor again."""
    if not values.dtype.names:
        return torch.from_numpy(values.copy())
    bits = torch.from_numpy(values.view(np.int16 if values.itemsize == 2 else np.uint8).copy())
    dtype: torch.dtype = getattr(torch, values.dtype.names[0])
    return bits.view(dtype)


def _optimizer_tensors(optimizer: torch.optim.Optimizer) -> Tensors:
    tensors: Tensors = {}
    for index, state in optimizer.state_dict()["state"].items():
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                tensors[f"{index}.{name}"] = _copy(value)
            elif isinstance(value, int | float):
                tensors[f"{index}.{name}"] = np.array(value, np.float64)
    return tensors


def _load_optimizer(optimizer: torch.optim.Optimizer, tensors: Tensors) -> None:
    state: dict[int, dict[str, torch.Tensor]] = {}
    for name, values in tensors.items():
        index, key = name.split(".", 1)
        state.setdefault(int(index), {})[key] = _tensor(values)
    whole = optimizer.state_dict()
    whole["state"] = state
    optimizer.load_state_dict(whole)
