"""What the cache's tests share: a dataset that counts decodes, and processes that are always ended."""

import contextlib
import multiprocessing
import os
from collections import Counter
from pathlib import Path

import numpy as np

from shoestring.cache.dataset import cached
from shoestring.cache.folder import CacheFolder

TIMEOUT_S = 60.0
FORK = multiprocessing.get_context("fork")


def make_folder(path: Path, limit_bytes: int = 64 << 20) -> CacheFolder:
    path.mkdir(0o700, exist_ok=True)
    return CacheFolder(path, limit_bytes)


class Pictures:
    """Arrays that depend on their index alone; every decode leaves four bytes in a file."""

    def __init__(self, log: Path, length: int = 60) -> None:
        self.log = log
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        log = os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(log, index.to_bytes(4, "big"))
        os.close(log)
        return picture(index), index

    def decodes(self) -> Counter[int]:
        """How often each sample was decoded, by all processes together."""
        written = self.log.read_bytes() if self.log.exists() else b""
        return Counter(int.from_bytes(written[at : at + 4], "big") for at in range(0, len(written), 4))


def picture(index: int) -> np.ndarray:
    source = np.random.default_rng(index)
    return source.integers(0, 256, int(source.integers(1, 20_000)), np.uint8)


def make_cached(log: Path, path: Path, **options):
    path.mkdir(0o700, exist_ok=True)
    return cached(Pictures(log), name="pictures", folder=path, **options)


def check(samples, indices) -> None:
    for (array, label), index in zip(samples, indices, strict=True):
        assert label == index
        np.testing.assert_array_equal(array, picture(index))


@contextlib.contextmanager
def process(target, *args, context=FORK):
    """A process that is killed at the end of the block if it has not ended."""
    started = context.Process(target=target, args=args)
    started.start()
    try:
        yield started
    finally:
        started.kill()
        started.join(TIMEOUT_S)


def expect_success(started) -> None:
    started.join(TIMEOUT_S)
    assert started.exitcode == 0
