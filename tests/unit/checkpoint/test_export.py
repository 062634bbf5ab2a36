"""A checkpoint's parts become the model's own tensors again."""

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_torch

from shoestring.checkpoint.export import read_model, write_model
from shoestring.checkpoint.snapshot import Snapshot
from shoestring.errors import SnapshotError, UsageError
from shoestring.model.parts import cut
from shoestring.model.precision import NARROW
from tests.unit.checkpoint.models import BUFFERS, SHAPES, assert_equal, make_model, write_checkpoint


def test_the_model_comes_back(tmp_path):
    model = make_model()
    assert len(cut(list(SHAPES.values()))) > 3
    assert_equal(read_model(Snapshot(write_checkpoint(tmp_path, 10, model))), model | BUFFERS)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_parameters_are_made_of_what_workers_keep_them_in(tmp_path, dtype):
    model = make_model()
    snapshot = Snapshot(write_checkpoint(tmp_path, 10, model, dtype=dtype, aliases={"tied": "b"}))
    output = tmp_path / "model.safetensors"
    write_model(read_model(snapshot), output)
    found = load_torch(output)
    kind: torch.dtype = getattr(torch, dtype)
    lead = 0.5 if dtype in NARROW else 0.0
    want = {name: (torch.from_numpy(values) + lead).to(kind) for name, values in model.items()}
    want |= {"tied": want["b"]} | {name: torch.from_numpy(values) for name, values in BUFFERS.items()}
    assert found.keys() == want.keys()
    for name, values in want.items():
        assert found[name].dtype == values.dtype
        assert torch.equal(found[name], values), name
    with safe_open(output, "np") as file:
        assert file.metadata() == {"format": "pt"}


def test_local_steps_export_what_all_agreed_on_rounded(tmp_path):
    """Of them shards hold no more than the master, which workers have too."""
    model = make_model()
    folder = write_checkpoint(
        tmp_path, 10, model, table=[[n, list(v.shape), 0, "float16"] for n, v in model.items()]
    )
    found = read_model(Snapshot(folder))
    assert_equal(found, {name: values.astype(np.float16) for name, values in model.items()} | BUFFERS)


def test_a_weight_of_several_modules_is_there_under_each_name(tmp_path):
    model = make_model()
    snapshot = Snapshot(write_checkpoint(tmp_path, 10, model, aliases={"tied": "b", "other": "nothing"}))
    assert_equal(read_model(snapshot), model | BUFFERS | {"tied": model["b"]})


@pytest.mark.parametrize(
    "table",
    [None, "x", [["a", [-1], 0]], [["a", [1 << 50], 0]], [["a", [10], 0]], [["a"]], [["a", [7], 0, "int8"]]],
)
def test_a_table_that_does_not_fit_is_refused(tmp_path, table):
    folder = write_checkpoint(tmp_path, 10, make_model(), table=table)
    with pytest.raises(SnapshotError, match="step-000000010"):
        read_model(Snapshot(folder))


def test_the_file_takes_the_place_of_an_older_one(tmp_path):
    output = tmp_path / "model.safetensors"
    for model in (make_model(), BUFFERS):
        write_model(model, output)
        assert_equal(load_file(output), model)
    assert list(tmp_path.iterdir()) == [output]


def test_a_place_that_cannot_be_written_is_an_error(tmp_path):
    with pytest.raises(UsageError, match="cannot be written"):
        write_model(make_model(), tmp_path / "missing" / "model.safetensors")
