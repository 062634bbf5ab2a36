"""Small checkpoints to test with, and what each must hold."""

import numpy as np

from shoestring.checkpoint.snapshot import (
    FileRecord,
    Manifest,
    Snapshot,
    TensorFileWriter,
    commit,
    newest,
    step_folder,
)

PARTS = 4
FILES = ["shard-0.safetensors", "shard-1.safetensors", "worker-0.safetensors"]


def make_tensors(step: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(step)
    tensors = {}
    for part in range(PARTS):
        size = 1500 + 100 * part
        tensors[f"part.{part:05d}.params"] = rng.standard_normal(size, np.float32)
        tensors[f"part.{part:05d}.state.exp_avg"] = rng.standard_normal(size, np.float32)
        tensors[f"part.{part:05d}.kept"] = rng.standard_normal(size, np.float32)
    return tensors


def write_file(path, tensors, facts=None) -> FileRecord:
    with TensorFileWriter(path, {name: (x.dtype, x.shape) for name, x in tensors.items()}) as writer:
        for name, values in tensors.items():
            writer.write(name, values)
        return writer.finish(facts)


def write_files(folder, step: int, shards: int = 2) -> list[FileRecord]:
    """Deal the parts out to the shards; the worker's file holds a tensor of its own."""
    tensors = make_tensors(step)
    records = []
    for shard in range(shards):
        mine = {name: x for name, x in tensors.items() if int(name.split(".")[1]) % shards == shard}
        records.append(write_file(folder / f"shard-{shard}.safetensors", mine, {"ledger": {"0": [1, step]}}))
    worker = {"worker.0.kept": np.full(1500, step, np.float32)}
    return [*records, write_file(folder / "worker-0.safetensors", worker)]


def make_manifest(step: int, files: list[FileRecord], /, **changes) -> Manifest:
    given = {"step": step, "workers": 1, "shards": 2, "facts": {"codec": "dct"}, "files": files}
    return Manifest(**given | changes)


def write_checkpoint(root, step: int, shards: int = 2):
    folder = step_folder(root, step)
    commit(folder, make_manifest(step, write_files(folder, step, shards), shards=shards))
    return folder


def assert_holds(snapshot: Snapshot | None, step: int) -> None:
    assert snapshot is not None
    assert snapshot.manifest.step == step
    want = make_tensors(step) | {"worker.0.kept": np.full(1500, step, np.float32)}
    assert snapshot.names().keys() == want.keys()
    for name, values in want.items():
        found = snapshot.read(name)
        assert snapshot.spec(name) == (found.dtype.name, found.shape) == (values.dtype.name, values.shape)
        assert found.tobytes() == values.tobytes()


def falls_back(root, to: int, *named) -> None:
    """The newest checkpoint is passed over, with one error that names the file."""
    found, passed_over = newest(root)
    assert_holds(found, to)
    assert len(passed_over) == 1
    assert any(f"`{path}`" in passed_over[0].message for path in named), passed_over


def flip(path, at: int, bit: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        octet = file.read(1)[0]
        file.seek(at)
        file.write(bytes([octet ^ 1 << bit]))
