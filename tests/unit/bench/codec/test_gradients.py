"""Captures repeat bit for bit, are kept, and survive a damaged file; made-up sets have their size."""

import builtins
from dataclasses import replace

import numpy as np
import pytest

from shoestring.bench import data
from shoestring.bench.codec import gradients
from shoestring.bench.recipe import FULL, QUICK, Recipe
from shoestring.errors import ShoestringError, UsageError

CONV = Recipe("conv", width=4, steps=2, early=(1,), batch=4, learning_rate=0.05)
GPT = Recipe(
    "gpt", width=16, steps=2, early=(1, 60), batch=2, learning_rate=1e-3, layers=1, heads=2, context=16
)


@pytest.fixture(autouse=True)
def digits(tmp_path, monkeypatch):
    monkeypatch.delenv(data.VARIABLE, raising=False)
    monkeypatch.setattr(data, "DEBIAN", tmp_path / "nowhere")


def silent(what, done, total):
    pass


@pytest.mark.parametrize("recipe", [CONV, GPT], ids=["conv", "gpt"])
def test_capture_is_kept_and_repeats(recipe, own_gradients):
    label, first = gradients.captured(recipe, 2, None, silent)
    (file,) = own_gradients.iterdir()
    assert file.name.startswith(f"{label}-")
    assert label == ("conv-digits" if recipe is CONV else "gpt")

    def fail(what, done, total):
        raise AssertionError("trained again")

    _, again = gradients.captured(recipe, 2, None, fail)
    file.unlink()
    _, anew = gradients.captured(recipe, 2, None, silent)
    for a, b, c in zip(first, again, anew, strict=True):
        assert a.any()
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(a, c)


def test_steps_differ_and_keep_the_order_of_the_model():
    _, first = gradients.captured(CONV, 1, None, silent)
    _, last = gradients.captured(CONV, 2, None, silent)
    assert [tensor.shape for tensor in first] == [tensor.shape for tensor in last]
    assert (first[0].shape, first[-1].shape) == ((4, 1, 3, 3), (10,))
    assert not np.array_equal(first[0], last[0])


def test_damaged_capture_is_taken_anew(own_gradients):
    _, wanted = gradients.captured(CONV, 2, None, silent)
    (file,) = own_gradients.iterdir()
    file.write_bytes(file.read_bytes()[:100])
    _, found = gradients.captured(CONV, 2, None, silent)
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(a, b)
    assert list(own_gradients.iterdir()) == [file]


def test_name_changes_with_recipe_and_data():
    one, other = np.zeros(3, np.uint8), np.ones(3, np.uint8)
    assert CONV.digest(one) == replace(CONV).digest(one)
    assert len({CONV.digest(one), CONV.digest(other), replace(CONV, steps=3).digest(one)}) == 3


def test_recipes_have_the_sizes_they_name():
    from shoestring.bench.codec.training import Transformer, residual_net

    assert sum(p.numel() for p in residual_net(FULL["conv"].width).parameters()) == 2_776_522
    gpt = FULL["gpt"]
    model = Transformer(gpt.width, gpt.layers, gpt.heads, gpt.context)
    assert sum(p.numel() for p in model.parameters()) == 1_902_720


def test_capture_without_torch_says_what_to_install(monkeypatch):
    real = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name == "shoestring.bench.codec" and args and args[2] == ("training",):
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ShoestringError, match="torch is not installed") as error:
        gradients.captured(CONV, 2, None, silent)
    assert "shoestring[torch]" in error.value.hint


def test_folder_that_cannot_be_written_is_named(own_gradients):
    own_gradients.write_text("a file where the folder should be")
    with pytest.raises(ShoestringError, match="cannot be written") as error:
        gradients.captured(CONV, 2, None, silent)
    assert "XDG_CACHE_HOME" in error.value.hint


@pytest.mark.parametrize("name", ["gaussian", "laplace", "zeros", "dense"])
def test_synthetic_sets_have_their_size_and_repeat(name):
    bucket = gradients.load(name, size_mb=0.1)
    assert bucket.values.size == bucket.layout.total == 25_000
    assert any(size % 2 for size in bucket.layout.sizes)
    np.testing.assert_array_equal(bucket.values, gradients.load(name, size_mb=0.1).values)
    if name == "dense":
        assert set(bucket.values.tolist()) == {-1.0, 1.0}
    assert bucket.values.any() == (name != "zeros")


def test_captured_bucket_is_repeated_to_a_size(monkeypatch):
    monkeypatch.setitem(QUICK, "conv", CONV)
    once = gradients.load("conv", quick=True)
    assert once.name == "conv-digits"
    assert gradients.load("conv-1", quick=True).name == "conv-digits-1"
    twice = gradients.load("conv", quick=True, size_mb=1.5 * once.values.nbytes / 1e6)
    np.testing.assert_array_equal(twice.values, np.concatenate([once.values, once.values]))
    assert twice.layout.shapes == once.layout.shapes * 2


def test_names_and_an_unknown_one():
    assert gradients.names(False)[:6] == ["conv", "conv-30", "conv-3", "gpt", "gpt-60", "gpt-3"]
    assert set(gradients.QUICK_NAMES) <= set(gradients.names(True))
    with pytest.raises(UsageError, match="there are no gradients `conv-4`"):
        gradients.load("conv-4")
