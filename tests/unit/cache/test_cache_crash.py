"""Jobs killed at any point leave every stored sample whole, and the cache in use."""

import os
import random

import numpy as np

from shoestring.cache import samples
from shoestring.cache.folder import About
from shoestring.cache.store import close_store, open_store
from tests.unit.cache.cachejobs import FORK, TIMEOUT_S, make_folder, picture

ABOUT = About("killed", "", 50)
ROUNDS = 100
JOBS = 3
SEED = 20


def write_forever(folder, seed, progress):
    """Store samples, the same ones again and again, and read others; tell about each."""
    store, order = open_store(folder, ABOUT), random.Random(seed)
    while True:
        index = order.randrange(ABOUT.length)
        with store.claim(index) as is_mine:
            if is_mine:
                store.put(index, samples.encode((picture(index), index)))
        store.get(order.randrange(ABOUT.length))
        os.write(progress, b".")


def verify(folder):
    store = open_store(folder, ABOUT)
    for index in range(ABOUT.length):
        encoded = store.get(index)
        if encoded is not None:
            array, label = samples.decode(encoded)  # raises where the checksum is wrong
            assert label == index
            np.testing.assert_array_equal(array, picture(index))


def test_writers_killed_at_random_points_corrupt_nothing(tmp_path):
    print(f"seed {SEED}")
    source, folder = random.Random(SEED), make_folder(tmp_path / "cache")
    store = open_store(folder, ABOUT)
    for number in range(ROUNDS):
        read, write = os.pipe()
        jobs = [
            FORK.Process(target=write_forever, args=(folder, JOBS * number + i, write)) for i in range(JOBS)
        ]
        for job in jobs:
            job.start()
        os.close(write)
        try:
            for _ in range(source.randrange(1, 20)):
                assert os.read(read, 1)  # they write meanwhile, so the kill meets them anywhere
        finally:
            for job in jobs:
                job.kill()
            for job in jobs:
                job.join(TIMEOUT_S)
            os.close(read)
        verify(folder)
        for index in range(ABOUT.length):  # nobody holds anything any more
            with store.claim(index) as is_mine:
                assert is_mine
        mark = (number, bytes(source.randbytes(source.randrange(9000))))
        assert store.put(ABOUT.length, samples.encode(mark))
        assert samples.decode(store.get(ABOUT.length)) == mark
    assert store.count() == ABOUT.length + 1
    close_store(folder, ABOUT)
    verify(folder)
    close_store(folder, ABOUT)
