"""Kernels of `dct` are loaded for the blocks that a model's shapes need, before anything waits for them."""

import subprocess
import sys

import numpy as np
import pytest

from shoestring.codec import warmup
from shoestring.codec.base import Layout
from shoestring.codec.dct.codec import Dct
from shoestring.codec.dct.options import Options
from shoestring.codec.registry import make

MATRICES = Layout.of([(64, 64), (64,)])
CONVOLUTIONS = Layout.of([(64, 64, 3, 3), (64, 16, 5, 5), (512,)])


@pytest.fixture
def asked(monkeypatch):
    """The jobs that are to be run, each time; none is."""
    found = []
    monkeypatch.setattr(warmup, "have_ready", lambda module, jobs, say: found.append((module, list(jobs))))
    monkeypatch.setattr(warmup, "_ready", set())
    return found


def test_only_what_the_shapes_need_and_only_once(asked):
    warmup.prepare_dct([MATRICES], Options())
    warmup.prepare_dct([MATRICES], Options())
    warmup.prepare_dct([MATRICES, CONVOLUTIONS], Options())
    warmup.prepare_dct([CONVOLUTIONS], Options())
    warmup.prepare_dct([MATRICES], Options(block=16))
    module = "shoestring.codec.warmup"
    assert asked == [(module, ["8x8", "1x1"]), (module, ["5x5", "3x3"]), (module, ["16x16"])]


def test_without_transform_no_block_is_needed(asked):
    warmup.prepare_dct([CONVOLUTIONS], Options(transform="never"))
    assert [jobs for _, jobs in asked] == [["1x1"]]


def test_coding_has_its_own_kernels_loaded(asked):
    values = np.ones(MATRICES.total, np.float32)
    payload = make("dct").encode(values, MATRICES)
    assert [jobs for _, jobs in asked] == [["8x8", "1x1"]]
    warmup._ready.clear()
    make("dct").decode(payload, MATRICES, values)
    assert [jobs for _, jobs in asked] == [["8x8", "1x1"]] * 2
    warmup._ready.clear()
    Dct(backend="numpy").decode(payload, MATRICES, values)
    assert len(asked) == 2


def test_who_is_to_be_told_is_told(monkeypatch):
    said = []
    monkeypatch.setattr(warmup, "have_ready", lambda module, jobs, say: say(" ".join(jobs)))
    monkeypatch.setattr(warmup, "_ready", set())
    monkeypatch.setattr(warmup, "_tell", warmup._tell)
    warmup.prepare_dct([MATRICES], Options())
    warmup.tell(said.append)
    warmup.prepare_dct([CONVOLUTIONS], Options())
    warmup.prepare_dct([MATRICES], Options(block=16), said.append)
    assert said == [f"{jobs} (the blocks of codec `dct`)" for jobs in ("5x5 3x3", "16x16")]


@pytest.mark.parametrize("n", [1, 4, 8])
def test_a_job_runs_alone(n):
    done = subprocess.run([sys.executable, "-m", warmup.__name__, f"{n}x{n}"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
