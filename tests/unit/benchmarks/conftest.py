"""A cache folder of its own for every test, and a small bucket."""

import numpy as np
import pytest

from shoestring.bench.codec.gradients import Bucket


@pytest.fixture(autouse=True)
def own_gradients(tmp_path, monkeypatch):
    """Keep captures in the test's folder; compiled kernels stay where they are."""
    folder = tmp_path / "gradients"
    monkeypatch.setattr("shoestring.bench.codec.gradients.cache_folder", lambda: folder)
    return folder


@pytest.fixture
def bucket() -> Bucket:
    rng = np.random.default_rng(7)
    shapes = [(16, 8, 3, 3), (33, 70), (5,), (0, 4), (), (4096,)]
    return Bucket.of("small", [rng.standard_normal(shape).astype(np.float32) for shape in shapes])
