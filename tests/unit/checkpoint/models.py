"""A model, and checkpoints of it as two shards and two workers write them."""

import numpy as np

from shoestring.checkpoint.snapshot import Manifest, TensorFileWriter, commit, step_folder
from shoestring.model.parts import cut
from shoestring.model.precision import NARROW, Precision

# One too large for a part, one with a row too large, an empty one and a scalar.
SHAPES = {"embed.weight": (700, 100), "wide.weight": (2, 50_000), "none": (0, 3), "scale": (), "b": (7,)}
BUFFERS = {
    "norm.running_mean": np.arange(4, dtype=np.float32),
    "norm.num_batches_tracked": np.array(3, np.int64),
}


def make_model() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}


def write_file(path, tensors):
    with TensorFileWriter(path, {name: (x.dtype, x.shape) for name, x in tensors.items()}) as writer:
        for name, values in tensors.items():
            writer.write(name, values)
        return writer.finish()


def write_checkpoint(root, step, model, *, dtype="float32", **facts):
    """A checkpoint as two shards and two workers write it, which keep parameters in `dtype`."""
    folder = step_folder(root, step)
    flats = [values.reshape(-1) for values in model.values()]
    shards: list[dict[str, np.ndarray]] = [{}, {}]
    for part in cut([values.shape for values in model.values()]):
        values = np.concatenate([flats[piece.tensor][piece.start : piece.stop] for piece in part.pieces])
        prefix = f"part.{part.index:05d}"
        shards[part.index % 2] |= {f"{prefix}.params": values, f"{prefix}.kept": np.ones_like(values)}
        if dtype in NARROW:  # what workers hold is not the master, rounded
            held = values + np.float32(0.5)
            Precision(part, [dtype] * len(part.pieces)).round(held)
            shards[part.index % 2][f"{prefix}.held"] = held
            del shards[part.index % 2][f"{prefix}.kept"]
    files = [write_file(folder / f"shard-{index}.safetensors", held) for index, held in enumerate(shards)]
    for worker in range(2):
        held = {f"worker.{worker}.buffer.{name}": values + worker for name, values in BUFFERS.items()}
        files.append(write_file(folder / f"worker-{worker}.safetensors", held))
    table: list[list] = [[name, list(values.shape), 0] for name, values in model.items()]
    if dtype != "float32":
        table = [[*row, dtype] for row in table]
    commit(folder, Manifest(step=step, workers=2, shards=2, facts={"table": table} | facts, files=files))
    return folder


def assert_equal(found, want):
    assert found.keys() == want.keys()
    for name, values in want.items():
        assert found[name].dtype == values.dtype
        assert found[name].shape == values.shape
        np.testing.assert_array_equal(found[name], values)
