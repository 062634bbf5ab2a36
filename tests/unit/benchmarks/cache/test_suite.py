"""`python -m benchmarks.cache`: what is checked before a time counts, and what is reported."""

from dataclasses import asdict

import numpy as np
import pytest

from benchmarks.cache import suite as cache
from shoestring.bench.data import Images
from shoestring.errors import ShoestringError

TINY = cache.Effort(pictures=40, blocks=1)


def test_two_jobs_share_every_decode():
    rows = cache.measure(TINY, lambda *_: None)
    assert [row.order for row in rows] == list(cache.ORDERS)
    for row in rows:
        assert (row.private_decodes, row.shared_decodes) == (80, 40)
        assert row.correct is True
        assert row.ratio == pytest.approx(row.shared_samples_s / row.private_samples_s, rel=1e-9)
        assert all(value for value in asdict(row).values())


def test_pictures_are_the_same_each_time_and_decode_to_their_size():
    source = np.random.default_rng(1)
    images = Images(
        "noise", source.integers(0, 256, (50, 28, 28), np.uint8), np.arange(50, dtype=np.uint8) % 10
    )
    first, second = (cache.make_pictures(images, 3) for _ in range(2))
    assert first.files == second.files
    picture, label, index = first[2]
    assert (tuple(picture.shape), index) == ((3, cache.SIDE, cache.SIDE), 2)
    assert label == first.labels[2]


@pytest.mark.parametrize(
    ("decodes", "checksums", "found"),
    [
        ((20, 20, 10, 11, 0, 0), [0] * 6, "decoded 21"),
        ((20, 20, 10, 10, 0, 0), [0, 0, 0, 1, 0, 0], "other samples"),
    ],
)
def test_what_is_not_right_is_not_reported(monkeypatch, decodes, checksums, found):
    passes = [cache.Pass(*pair) for pair in zip(decodes, map(np.array, checksums), strict=True)]

    def run(jobs, tasks):
        return 1.0, [passes.pop(0), passes.pop(0)]

    monkeypatch.setattr(cache, "_run", run)
    with pytest.raises(ShoestringError, match=found):
        cache._measure_block([], 20, "own", 0)
