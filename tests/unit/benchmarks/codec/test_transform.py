"""Bits at an equal error: the search lands where it should."""

import json

import numpy as np
import pytest

from benchmarks.codec.__main__ import main
from benchmarks.codec.transform import bits_at, compare
from shoestring.bench import data, recipe
from shoestring.bench.codec import gradients
from shoestring.bench.codec.gradients import Bucket


def test_search_lands_on_the_error():
    # top-k of equal magnitudes: an error of e is left by sending 1 - e of the values, 6 bytes each.
    flat = Bucket.of("flat", [np.ones(60_000, np.float32)])
    for error in (0.5, 0.25, 0.1):
        bits = bits_at(flat, error, lambda x: f"topk:ratio={1 / x}", 1.0, 2.0**12)
        assert bits == pytest.approx(48 * (1 - error), rel=0.01)


def test_error_out_of_reach_is_none():
    bucket = Bucket.of("small", [np.random.default_rng(7).standard_normal((33, 70)).astype(np.float32)])
    assert bits_at(bucket, 0.9, lambda x: f"dct:step={x}", 0.1, 0.2) is None


def test_transform_pays_on_smooth_blocks_and_ratios_say_so():
    y, x = np.mgrid[0:8, 0:8]
    rng = np.random.default_rng(8)
    smooth = np.cos(np.pi * (2 * x + 1) / 16) * rng.standard_normal((512, 1, 1)) + 0 * y
    result = compare(Bucket.of("smooth", [smooth.reshape(512, 64).astype(np.float32)]), 0.1)
    assert result.dct_over_never == result.dct / result.never < 0.5
    assert result.dct_over_topk == result.dct / result.topk < 0.5
    assert result.dct_block_8_over_never == result.dct_block_8 / result.never


def test_command_compares_captured_gradients(capsys, monkeypatch, tmp_path):
    def run(*args):
        with pytest.raises(SystemExit) as left:
            main(["--quick", *args])
        return left.value.code, *capsys.readouterr()

    monkeypatch.setattr(gradients, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(data, "DEBIAN", tmp_path / "nowhere")
    monkeypatch.delenv(data.VARIABLE, raising=False)
    tiny = recipe.Recipe("conv", width=8, steps=2, early=(), batch=4, learning_rate=0.05)
    monkeypatch.setitem(recipe.QUICK, "conv", tiny)
    code, out, err = run("--json")
    assert code == 0
    result = json.loads(out, parse_constant=pytest.fail)
    assert set(result) == {"machine", "transform"}
    assert [(row["gradients"], row["nmse"]) for row in result["transform"]] == [
        ("conv-digits", error) for error in (0.5, 0.25, 0.1)
    ]
    assert "capturing `conv` gradients (0 of 2)" in err
    code, out, err = run()
    assert (code, "capturing" in err) == (0, False)
    assert "bits a value at an equal error" in out
    assert "…" not in out


def test_gradients_that_are_not_there_are_named(capsys):
    with pytest.raises(SystemExit) as left:
        main(["--quick", "--gradients", "conv,nothing"])
    assert left.value.code == 2
    assert "there are no gradients `nothing`" in capsys.readouterr().err
