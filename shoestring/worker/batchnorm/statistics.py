"""What a worker's BatchNorm layers have seen, on its way to the shards and back.

`take` hands out, part by part, what a push carries; `hear` takes what an answer brought.
The shards' history holds this worker's own batches too. What others have seen is the
history less the worker's own share of it, which is followed here in the same way as the
shards follow the whole.

Evaluation uses the history of all: an answer sets the running statistics of its layers,
so that they are the same on every worker that has heard the same answers.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shoestring.errors import SnapshotError
from shoestring.model.layers import Layer
from shoestring.model.parts import Part, Piece, layers_of
from shoestring.model.statistics import (
    Doubles,
    History,
    Statistics,
    form_of,
    nothing,
    pack,
    unpack,
    warm_up_history,
)
from shoestring.worker.batchnorm import statkernels as kernels
from shoestring.worker.batchnorm.layers import SharedBatchNorm, share_batchnorm, shared_layers
from shoestring.worker.batchnorm.normalise import Others, Seen

# The history counts as this many steps of the other workers at most. Measured: more steadies
# the statistics at small batches and keeps a worker's own classes out of them; docs/batchnorm.md.
REACH = 2.0
_LEAST = 1e-3  # of a layer's values: less cannot be told from rounding


class LayerRecord:
    """One layer's view: what it has seen since the last push, and what others saw before."""

    def __init__(self, keep: float) -> None:
        self.keep = keep
        self.others: Others | None = None
        self.like: Any = np.empty(0)  # where `others` should lie
        self._weight = 0.0  # of the steps before the present one
        self._count = 0.0
        self._sums: Tensor | Doubles | None = None

    def note(self, seen: Seen) -> None:
        """Count one pass of a batch, after its backward."""
        self._sums = seen.sums if self._sums is None else self._sums + seen.sums
        self._count += seen.count
        self.like = seen.like

    def next_step(self) -> None:
        """Make room for another local step before the next push: what was seen fades a little."""
        self._weight = self._weight * self.keep + 1
        self._count *= self.keep
        if self._sums is not None:
            self._sums = self._sums * self.keep

    def take(self) -> tuple[float, float, Doubles | None]:
        """Return the weight, the count and the sums [4, C] since the last call."""
        sums = self._sums.cpu().numpy() if isinstance(self._sums, Tensor) else self._sums
        taken = (self._weight * self.keep + 1, self._count, sums)
        self._weight, self._count, self._sums = 0.0, 0.0, None
        return taken


@dataclass
class _PartRecord:
    """The layers whose statistics travel with one part."""

    layers: tuple[Layer, ...]
    modules: list[SharedBatchNorm]
    records: list[LayerRecord]
    own: History
    version: int = 0
    sent: dict[int, Statistics] = field(default_factory=dict)  # by round, until it is answered

    def __post_init__(self) -> None:
        self.places = _places(self.layers)
        self.form = form_of(self.layers)

    def fade(self, pushes: int, share: float) -> None:
        """Let pushes of others go by, each of which stands for a share of a step."""
        forgets = np.array([1 - layer.keep for layer in self.layers])
        self.own.fade((1 - (1 - forgets * share) ** max(pushes, 0)) / forgets)


class SharedStatistics:
    """All shared layers of a replica. Used by the training thread alone."""

    def __init__(
        self,
        layers: Sequence[Layer],
        modules: Sequence[SharedBatchNorm],
        parts: Sequence[Part],
        *,
        workers: int,
        is_local: bool = False,
        warmup: int = 100,
    ) -> None:
        self._weight = 1.0  # how much this worker's gradient counts
        self._workers = workers
        self._is_local = is_local
        self._warmup = warmup
        named = dict(zip(layers, modules, strict=True))
        self._parts: dict[int, _PartRecord] = {}
        for part in parts if workers > 1 else ():  # alone, the layers are plain BatchNorm
            own = layers_of(part, layers)
            if own:
                records = [LayerRecord(layer.keep) for layer in own]
                self._parts[part.index] = _PartRecord(
                    own, [named[layer] for layer in own], records, History(own)
                )
        self.is_on = bool(self._parts)  # whether any part carries statistics
        for module in modules:
            module.record = None
        for here in self._parts.values():
            for module, record in zip(here.modules, here.records, strict=True):
                module.record = record

    def next_step(self) -> None:
        """Say that another local step follows before the next push."""
        for part in self._parts.values():
            for record in part.records:
                record.next_step()

    def take(self, part: int, seq: int, weight: float) -> bytes:
        """What the push of a part carries in round `seq`; empty where no layer goes with it.

        The worker's gradient counts by `weight`, and so do its slopes.
        """
        here = self._parts.get(part)
        if here is None:
            return b""
        self._weight = weight
        statistics = _gather(here, weight)
        data = pack(statistics, here.layers)
        here.sent[seq] = unpack(data, here.layers)
        return data

    def hear(self, part: int, version: int, seq: int, data: bytes, *, is_whole: bool = True) -> None:
        """Take what the answer to round `seq` says of all workers' layers; `seq` 0: to a pull."""
        here = self._parts.get(part)
        if here is None or not data:
            return
        every = unpack(data, here.layers)
        passed, here.version = version - here.version, version
        # An answer may stand for earlier ones, too, which then bring nothing themselves.
        answered = [here.sent.pop(key) for key in sorted(here.sent) if key <= seq]
        if is_whole:
            here.own.take(answered, 1.0)
        elif seq:
            # Every push of anyone is a share of a step; this worker's own come last, as far as it knows.
            here.fade(passed - len(answered), 1 / self._workers)
            for own in answered:
                here.own.take([own], 1 / self._workers)
        self._tell(here, every, version if is_whole else version / self._workers)

    def state(self) -> dict[str, Doubles]:
        """This worker's share of the history, and its weight, for a checkpoint."""
        state = {_name(index, here): here.own.sums.copy() for index, here in self._parts.items()}
        return state | {"statistics.weight": np.array([self._weight])} if state else {}

    def load(self, state: dict[str, Doubles]) -> None:
        """Go on from a checkpoint; where it has other layers, their history begins anew."""
        for index, here in self._parts.items():
            saved = state.get(_name(index, here))
            if saved is not None:
                _check(_name(index, here), saved, here.own.sums.shape)
                here.own.sums[:] = saved
        weight = state.get("statistics.weight")
        if weight is not None:
            _check("statistics.weight", weight, (1,))
            self._weight = float(weight[0])

    def _tell(self, here: _PartRecord, every: Statistics, steps: float) -> None:
        """Let the layers of a part know what all have seen, and what others have."""
        trust = min(1.0, steps / self._warmup) if self._warmup else 1.0
        counts, rows = np.empty(here.form.layers), np.empty((4, here.form.channels))
        running = np.empty((2, here.form.channels), np.float32)
        own = here.own.statistics()
        kernels.subtract(
            every.arrays, own.arrays, here.form.widths, _LEAST, REACH, trust, self._weight,
            counts, rows, running,
        )  # fmt: skip
        for index, start, stop in here.places:
            if every.count[index] > 0:
                here.modules[index].set_running(*running[:, start:stop])
            here.records[index].others = self._others(
                here.records[index].like, float(counts[index]), rows[:, start:stop]
            )

    def _others(self, like: Any, count: float, rows: Any) -> Others | None:
        if count < 0:  # nobody else has seen this layer
            return None
        known = torch.from_numpy(rows).to(like) if isinstance(like, Tensor) else rows
        mean, variance, shift, scale = known
        return Others(count, mean, variance, shift, scale, self._is_local)


def warm_up_statistics(modules: Iterable[SharedBatchNorm]) -> None:
    """Load or compile what layers like these compute with in a step."""
    warm_up_history()
    layer = Layer("", 2, 0, 0.5)
    part = Part(0, (Piece(0, 0, 2, (2,)),))
    alike = share_batchnorm(nn.BatchNorm1d(2))
    every = SharedStatistics((layer,), [one for _, one in shared_layers(alike)], (part,), workers=2)
    for dtype in {module.weight.dtype for module in modules if module.affine}:
        alike.to(dtype)(torch.zeros(2, 2, dtype=dtype, requires_grad=True)).sum().backward()
    every.hear(0, 1, 1, every.take(0, 1, 1.0))


def _name(index: int, here: _PartRecord) -> str:
    return f"statistics.{index:05d}.{here.own.digest}"


def _check(name: str, found: Doubles, shape: tuple[int, ...]) -> None:
    if found.shape != shape or not np.isfinite(found).all():
        raise SnapshotError(
            f"`{name}` of the checkpoint has shape {found.shape}, expected {shape} and finite numbers",
            hint="resume from another checkpoint",
        )


def _places(layers: Sequence[Layer]) -> list[tuple[int, int, int]]:
    """Each layer's place, and where its channels start and stop."""
    places, start = [], 0
    for index, layer in enumerate(layers):
        places.append((index, start, start + layer.channels))
        start += layer.channels
    return places


def _gather(here: _PartRecord, weight: float) -> Statistics:
    """What the layers of a part have seen since the last push; its slopes count by `weight`."""
    found = nothing(here.form.layers, here.form.channels)
    sums, counts = np.zeros((4, here.form.channels)), np.zeros(here.form.layers)
    for record, (index, start, stop) in zip(here.records, here.places, strict=True):
        found.weight[index], counts[index], own = record.take()
        if own is not None:
            sums[:, start:stop] = own
    kernels.gather(sums, counts, here.form.widths, weight, *found.arrays[1:])
    return found
