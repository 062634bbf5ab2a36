"""`shoestring export`: a checkpoint's parts become the model's own tensors again."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from shoestring.checkpoint.snapshot import Manifest, TensorFileWriter, commit, step_folder
from shoestring.cli import main
from shoestring.model.parts import cut

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


def write_checkpoint(root, step, model, **facts):
    """A checkpoint as two shards and two workers write it."""
    folder = step_folder(root, step)
    flats = [values.reshape(-1) for values in model.values()]
    shards: list[dict[str, np.ndarray]] = [{}, {}]
    for part in cut([values.shape for values in model.values()]):
        values = np.concatenate([flats[piece.tensor][piece.start : piece.stop] for piece in part.pieces])
        prefix = f"part.{part.index:05d}"
        shards[part.index % 2] |= {f"{prefix}.params": values, f"{prefix}.kept": np.ones_like(values)}
    files = [write_file(folder / f"shard-{index}.safetensors", held) for index, held in enumerate(shards)]
    for worker in range(2):
        held = {f"worker.{worker}.buffer.{name}": values + worker for name, values in BUFFERS.items()}
        files.append(write_file(folder / f"worker-{worker}.safetensors", held))
    table = [[name, list(values.shape), 0] for name, values in model.items()]
    commit(folder, Manifest(step=step, workers=2, shards=2, facts={"table": table} | facts, files=files))
    return folder


def export(capsys, *args):
    with pytest.raises(SystemExit) as left:
        main(["export", *map(str, args)])
    out, err = capsys.readouterr()
    return left.value.code, out, err


def assert_equal(found, want):
    assert found.keys() == want.keys()
    for name, values in want.items():
        assert found[name].dtype == values.dtype
        assert found[name].shape == values.shape
        np.testing.assert_array_equal(found[name], values)


def test_the_model_comes_back(tmp_path, capsys):
    model = make_model()
    write_checkpoint(tmp_path, 10, {name: 0 * values for name, values in model.items()})
    folder = write_checkpoint(tmp_path, 20, model)
    assert len(cut(list(SHAPES.values()))) > 3
    for source in (tmp_path, folder):
        output = tmp_path / f"{source.name}.safetensors"
        code, out, err = export(capsys, source, output, "--json")
        assert (code, err) == (0, "")
        assert json.loads(out) == {"file": str(output), "step": 20, "tensors": 7, "values": 170_013}
        assert_equal(load_file(output), model | BUFFERS)
    assert not list(tmp_path.glob("*.partial"))


def test_a_file_that_is_there_stays_unless_forced(tmp_path, capsys):
    write_checkpoint(tmp_path, 10, make_model())
    output = tmp_path / "model.safetensors"
    output.write_text("mine")
    code, out, err = export(capsys, tmp_path, output)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: `{output}` already exists\n\nhint: ")
    assert output.read_text() == "mine"
    assert export(capsys, tmp_path, output, "--force")[:2] == (0, f"{output}\n")
    assert load_file(output).keys() == make_model().keys() | BUFFERS.keys()


@pytest.mark.parametrize(
    "table", [None, "x", [["a", [-1], 0]], [["a", [1 << 50], 0]], [["a", [10], 0]], [["a"]]]
)
def test_a_table_that_does_not_fit_is_an_error(tmp_path, capsys, table):
    write_checkpoint(tmp_path, 10, make_model(), table=table)
    code, out, err = export(capsys, tmp_path, tmp_path / "model.safetensors")
    assert (code, out) == (1, "")
    assert err.startswith("error: `")
    assert str(tmp_path) in err.splitlines()[0]
    assert not (tmp_path / "model.safetensors").exists()


def test_a_folder_without_checkpoints_is_an_error(tmp_path, capsys):
    code, _, err = export(capsys, tmp_path, tmp_path / "model.safetensors")
    assert code == 1
    assert f"there is no checkpoint in `{tmp_path}`" in err


def test_a_place_that_cannot_be_written_is_an_error(tmp_path, capsys):
    write_checkpoint(tmp_path, 10, make_model())
    code, _, err = export(capsys, tmp_path, tmp_path / "missing" / "model.safetensors")
    assert code == 2
    assert err.startswith(f"error: `{tmp_path / 'missing' / 'model.safetensors'}` cannot be written: ")
