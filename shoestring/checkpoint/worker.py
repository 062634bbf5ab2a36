"""A worker's file of a checkpoint: what the shards do not know.

Buffers (BatchNorm's statistics), feedback, random states, the place in the data, the state of a
local optimizer, learning rates, and whatever was given to `shoestring.keep`.

`WorkerState` is all of it as one value: what `worker.capture` takes from a training script, what
`WorkerWriter` writes, and what `read_worker` gives to a run that is resumed. Arrays are NumPy's;
nothing here knows torch.
"""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from numpy.typing import NDArray

from shoestring.checkpoint.snapshot import FileRecord, Snapshot, TensorFileWriter, step_folder
from shoestring.errors import SnapshotError

Tensors = dict[str, NDArray[Any]]
_RANDOM, _BUFFER, _OPTIMIZER = "random.", "buffer.", "optimizer."

_AT_ONCE = 4  # files that are being written; each holds a copy of the state


@dataclass(frozen=True)
class RandomState:
    """The states of a process's random generators: their arrays by name, and the small rest."""

    generators: Tensors
    facts: dict[str, Any]


@dataclass
class WorkerState:
    """What one worker saves. The default is that of a worker which starts afresh."""

    steps: int = 0
    position: tuple[int, int] = (0, 0)  # epochs finished, and batches trained on since
    places: list[tuple[int, int]] = field(default_factory=list)  # positions in loaders that were split
    random: RandomState | None = None
    buffers: Tensors = field(default_factory=dict)  # and frozen parameters
    feedback: Tensors = field(default_factory=dict)  # of pushes, and this worker's share of statistics
    optimizer: Tensors = field(default_factory=dict)  # of a local optimizer, as `INDEX.NAME`
    shares: list[list[int]] = field(default_factory=list)  # of a global batch
    groups: list[dict[str, Any]] = field(default_factory=list)  # numbers of the parameter groups
    stateful: list[dict[str, Any]] = field(default_factory=list)  # of what was given to `keep`

    def tensors(self) -> Tensors:
        """All arrays by their names in a worker's file, without the worker's number."""
        generators = self.random.generators if self.random is not None else {}
        return {
            **{_RANDOM + name: values for name, values in generators.items()},
            **{_BUFFER + name: values for name, values in self.buffers.items()},
            **self.feedback,
            **{_OPTIMIZER + name: values for name, values in self.optimizer.items()},
        }

    def facts(self) -> dict[str, Any]:
        """The rest, as JSON data under the names it has in a manifest."""
        return {
            "random": {} if self.random is None else self.random.facts,
            "steps": self.steps,
            "position": list(self.position),
            "places": [list(place) for place in self.places],
            "shares": self.shares,
            "groups": self.groups,
            "kept": self.stateful,
        }


class _Facts(msgspec.Struct):
    """What `WorkerState.facts` becomes in a manifest."""

    worker: int
    random: dict[str, Any]
    steps: int
    position: tuple[int, int]
    groups: list[dict[str, Any]]
    kept: list[dict[str, Any]]
    shares: list[list[int]] = []  # earlier versions had none
    places: list[tuple[int, int]] = []


def write_worker(root: Path, seq: int, worker: int, state: WorkerState) -> FileRecord:
    """Write `worker-N.safetensors` into the folder of a checkpoint; say what is in it."""
    named = {f"worker.{worker}.{name}": values for name, values in state.tensors().items()}
    folder = step_folder(root, seq)
    folder.mkdir(parents=True, exist_ok=True)
    specs = {name: (values.dtype, values.shape) for name, values in named.items()}
    with TensorFileWriter(folder / f"worker-{worker}.safetensors", specs) as writer:
        for name, values in named.items():
            writer.write(name, values)
        return writer.finish({"worker": worker, **state.facts()})


def read_worker(snapshot: Snapshot, worker: int) -> WorkerState | None:
    """Read what a worker saved; `None` if it was not there when the checkpoint was made."""
    for file in snapshot.manifest.files:
        if file.facts and file.facts.get("worker") == worker:
            break
    else:
        return None
    try:
        facts = msgspec.convert(file.facts, _Facts)
    except msgspec.ValidationError as error:
        raise SnapshotError(
            f"`{file.name}` of `{snapshot.folder}` has facts that cannot be used: {error}",
            hint="resume with the version that the checkpoint was made with",
        ) from None
    prefix = f"worker.{worker}."
    tensors = {
        name.removeprefix(prefix): snapshot.read(name) for name in snapshot.names() if name.startswith(prefix)
    }

    def take(kind: str) -> Tensors:
        names = [name for name in tensors if name.startswith(kind)]
        return {name.removeprefix(kind): tensors.pop(name) for name in names}

    return WorkerState(
        steps=facts.steps,
        position=facts.position,
        places=facts.places,
        random=RandomState(take(_RANDOM), facts.random),
        buffers=take(_BUFFER),
        optimizer=take(_OPTIMIZER),
        feedback=tensors,  # all that is left
        shares=facts.shares,
        groups=facts.groups,
        stateful=facts.kept,
    )


class WorkerWriter:
    """Writes one worker's files, each in a thread of its own, while training goes on.

    `on_written` is called in that thread. Failures wait until `failures` takes them, so that all
    else happens in the thread that owns the writer.
    """

    def __init__(self, root: Path, worker: int, on_written: Callable[[int, FileRecord], None]) -> None:
        self._root = root
        self._worker = worker
        self._on_written = on_written
        self._threads: list[threading.Thread] = []
        self._failures: deque[tuple[int, str]] = deque()

    def write(self, seq: int, state: WorkerState) -> None:
        """Begin to write; nothing of `state` may change any more. A slow disk slows rounds down."""
        if len(self._threads) == _AT_ONCE:
            self._threads[0].join()
        thread = threading.Thread(target=self._write, args=(seq, state), name="worker-writer")
        thread.start()
        self._threads = [*(t for t in self._threads if t.is_alive()), thread]

    def failures(self) -> list[tuple[int, str]]:
        """Take out the rounds whose file could not be written, and why."""
        return [self._failures.popleft() for _ in range(len(self._failures))]

    def wait(self, timeout_s: float) -> None:
        """Return when all that was begun is written or has failed, after so long for each at most."""
        for thread in self._threads:
            thread.join(timeout_s)

    def _write(self, seq: int, state: WorkerState) -> None:
        try:
            self._on_written(seq, write_worker(self._root, seq, self._worker, state))
        except Exception as error:  # whatever it is, training must hear of it
            self._failures.append((seq, str(error)))
