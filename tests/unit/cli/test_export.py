"""`shoestring export`: a checkpoint's parts become the model's own tensors again."""

import json

import pytest
from safetensors.numpy import load_file

from shoestring.cli import main
from tests.unit.checkpoint.models import BUFFERS, assert_equal, make_model, write_checkpoint


def export(capsys, *args):
    with pytest.raises(SystemExit) as left:
        main(["export", *map(str, args)])
    out, err = capsys.readouterr()
    return left.value.code, out, err


def test_the_model_comes_back(tmp_path, capsys):
    model = make_model()
    write_checkpoint(tmp_path, 10, {name: 0 * values for name, values in model.items()})
    folder = write_checkpoint(tmp_path, 20, model)
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


def test_a_checkpoint_that_does_not_fit_is_an_error(tmp_path, capsys):
    write_checkpoint(tmp_path, 10, make_model(), table="x")
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
