"""A checkpoint's parts become the model's own tensors again."""

import pytest
from safetensors.numpy import load_file

from shoestring.checkpoint.export import read_model, write_model
from shoestring.checkpoint.snapshot import Snapshot
from shoestring.errors import SnapshotError, UsageError
from shoestring.model.parts import cut
from tests.unit.checkpoint.models import BUFFERS, SHAPES, assert_equal, make_model, write_checkpoint


def test_the_model_comes_back(tmp_path):
    model = make_model()
    assert len(cut(list(SHAPES.values()))) > 3
    assert_equal(read_model(Snapshot(write_checkpoint(tmp_path, 10, model))), model | BUFFERS)


def test_a_weight_of_several_modules_is_there_under_each_name(tmp_path):
    model = make_model()
    snapshot = Snapshot(write_checkpoint(tmp_path, 10, model, aliases={"tied": "b", "other": "nothing"}))
    assert_equal(read_model(snapshot), model | BUFFERS | {"tied": model["b"]})


@pytest.mark.parametrize(
    "table", [None, "x", [["a", [-1], 0]], [["a", [1 << 50], 0]], [["a", [10], 0]], [["a"]]]
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
