"""A sample decoded once serves every process, and the cache is never needed."""

import threading

import numpy as np
import pytest
import torch

import shoestring
from shoestring.cache.store import open_store
from shoestring.errors import UsageError
from tests.unit.cache.cachejobs import (
    FORK,
    TIMEOUT_S,
    Pictures,
    check,
    expect_success,
    make_cached,
    process,
)

ALL = list(range(60))


@pytest.fixture
def paths(tmp_path):
    """Where decodes are written down, and where the cache is."""
    return tmp_path / "decodes", tmp_path / "cache"


@pytest.fixture
def data(paths):
    data = make_cached(*paths)
    yield data
    data.close()


def store_of(data):
    return open_store(data._folder, data._about)


def test_samples_are_the_datasets_and_decoded_once(data):
    for _ in range(3):
        check([data[index] for index in ALL], ALL)
    assert data.dataset.decodes() == dict.fromkeys(ALL, 1)
    assert (data.counts.decoded, data.counts.stored, data.counts.taken) == (60, 60, 120)


def test_it_is_a_sequence_like_the_dataset(data):
    assert len(data) == 60
    check([data[-1], data[np.int64(3)]], [59, 3])
    check(list(data), ALL)
    check(data.__getitems__([5, 5, 2]), [5, 5, 2])
    for index in (60, -61):
        with pytest.raises(IndexError):
            data[index]
    with pytest.raises(TypeError):
        data["3"]


def epoch(log, path, seed, epochs, barrier):
    data = make_cached(log, path)
    barrier.wait(TIMEOUT_S)
    for _ in range(epochs):
        order = ALL if seed is None else np.random.default_rng(seed).permutation(60).tolist()
        for start in range(0, 60, 12):
            check(data.__getitems__(order[start : start + 12]), order[start : start + 12])


@pytest.mark.parametrize("seeds", [(None, None), (0, 1), (0, 1, 2, 2)])
def test_jobs_at_the_same_time_decode_every_sample_once(paths, seeds):
    barrier = FORK.Barrier(len(seeds))
    jobs = [FORK.Process(target=epoch, args=(*paths, seed, 2, barrier)) for seed in seeds]
    for job in jobs:
        job.start()
    try:
        for job in jobs:
            expect_success(job)
    finally:
        for job in jobs:
            job.kill()
            job.join(TIMEOUT_S)
    assert Pictures(paths[0]).decodes() == dict.fromkeys(ALL, 1)


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_of_a_loader_share_it(data, context):
    check([data[0]], [0])  # open before the fork
    loader = torch.utils.data.DataLoader(
        data, batch_size=6, num_workers=2, collate_fn=list, multiprocessing_context=context, timeout=TIMEOUT_S
    )
    for _ in range(2):
        check([sample for batch in loader for sample in batch], ALL)
    assert data.dataset.decodes() == dict.fromkeys(ALL, 1)


class Gate(Pictures):
    """Says when it has begun to decode, and goes on when told."""

    def __init__(self, log, begun, go_on):
        super().__init__(log)
        self.begun, self.go_on = begun, go_on

    def __getitem__(self, index):
        self.begun.set()
        assert self.go_on.wait(TIMEOUT_S)
        return super().__getitem__(index)


def take_first(log, path, begun, go_on):
    check([make_gate(log, path, begun, go_on)[0]], [0])


def make_gate(log, path, begun, go_on):
    path.mkdir(0o700, exist_ok=True)
    return shoestring.cached(Gate(log, begun, go_on), name="pictures", folder=path)


def ask(data, answers):
    thread = threading.Thread(target=lambda: answers.append(data[0]))
    thread.start()
    return thread


def test_a_sample_that_another_decodes_is_waited_for(paths, data):
    begun, go_on, answers = FORK.Event(), FORK.Event(), []
    with process(take_first, *paths, begun, go_on) as other:
        assert begun.wait(TIMEOUT_S)
        thread = ask(data, answers)
        thread.join(0.05)
        assert answers == []
        go_on.set()
        thread.join(TIMEOUT_S)
        expect_success(other)
    check(answers, [0])
    assert data.dataset.decodes() == {0: 1}
    assert (data.counts.decoded, data.counts.taken) == (0, 1)


def test_whoever_waits_takes_over_from_one_that_is_killed(paths, data):
    begun, answers = FORK.Event(), []
    with process(take_first, *paths, begun, FORK.Event()) as other:
        assert begun.wait(TIMEOUT_S)
        thread = ask(data, answers)
        thread.join(0.05)
        assert answers == []
        other.kill()
        thread.join(TIMEOUT_S)
    check(answers, [0])
    assert (data.counts.decoded, data.counts.stored) == (1, 1)


def test_patience_has_an_end(paths):
    begun = FORK.Event()
    data = make_cached(*paths, patience_s=0.05)
    with process(take_first, *paths, begun, FORK.Event()):
        assert begun.wait(TIMEOUT_S)
        check([data[0]], [0])
    assert (data.counts.decoded, data.counts.stored) == (1, 0)
    data.close()


class OpensGate(Pictures):
    """Tells the other process to go on at sample 2: one that waits before that never gets there."""

    def __init__(self, log, go_on):
        super().__init__(log)
        self.go_on = go_on

    def __getitem__(self, index):
        if index == 2:
            self.go_on.set()
        return super().__getitem__(index)


def test_in_a_batch_others_work_is_left_to_the_end(paths):
    begun, go_on = FORK.Event(), FORK.Event()
    with process(take_first, *paths, begun, go_on) as other:
        assert begun.wait(TIMEOUT_S)
        data = shoestring.cached(OpensGate(paths[0], go_on), name="pictures", folder=paths[1])
        check(data.__getitems__([0, 1, 2]), [0, 1, 2])
        expect_success(other)
    assert data.dataset.decodes() == {0: 1, 1: 1, 2: 1}
    data.close()


class Broken(Pictures):
    def __getitem__(self, index):
        raise OSError("no such picture")


def test_an_error_of_the_dataset_is_its_own_and_frees_the_claim(data):
    broken = shoestring.cached(Broken(data.dataset.log), name="pictures", folder=data._folder.path)
    with pytest.raises(OSError, match="no such picture"):
        broken[0]
    check([data[0]], [0])


def test_a_damaged_sample_is_decoded_anew(data):
    check([data[4]], [4])
    store = store_of(data)
    damaged = store.get(4)
    damaged[-1] ^= 1
    store.put(4, damaged)
    check([data[4], data[4]], [4, 4])
    assert data.dataset.decodes() == {4: 2}


class Large:
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return np.full(400_000, index, np.uint8)


def test_without_room_samples_come_from_the_dataset(tmp_path):
    data = shoestring.cached(Large(), name="large", folder=tmp_path / "cache", budget="1MiB")
    for _ in range(2):
        assert [data[index].sum() for index in range(4)] == [0, 400_000, 800_000, 1_200_000]
    assert (data.counts.stored, data.counts.taken, data.counts.decoded) == (2, 2, 6)
    data.close()


def test_names_versions_and_lengths_keep_datasets_apart(tmp_path):
    def make(value, **options):
        return shoestring.cached([value] * 3, folder=tmp_path / "cache", **options)

    made = [
        make("a", name="one"),
        make("b", name="two"),
        make("c", name="one", version=2),
        shoestring.cached(["d"], name="one", folder=tmp_path / "cache"),
    ]
    assert [data[0] for data in made] == ["a", "b", "c", "d"]
    assert make("never decoded", name="one", version="2")[0] == "c"
    for data in made:
        data.close()


def test_what_cannot_be_cached_is_refused(tmp_path):
    with pytest.raises(UsageError, match="no length or no samples by index"):
        shoestring.cached(iter([1]), name="stream", folder=tmp_path / "cache")
    with pytest.raises(UsageError, match="needs a `name`"):
        shoestring.cached([1], name="", folder=tmp_path / "cache")
    data = shoestring.cached([{1, 2}], name="sets", folder=tmp_path / "cache")
    with pytest.raises(UsageError, match="`sample` is a `builtins.set`"):
        data[0]
    data.close()
