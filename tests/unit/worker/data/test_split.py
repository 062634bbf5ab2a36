"""A loader's batches go to the workers in turns, whatever it is built of, in one order for all."""

import random
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

from shoestring.checkpoint.worker import WorkerState
from shoestring.config import Run
from shoestring.errors import UsageError
from shoestring.observe.events import EventLog
from shoestring.worker.data.batches import Batches
from shoestring.worker.data.split import split_for
from shoestring.worker.session import Session

DATA = list(range(22))
Build = Callable[[], "DataLoader[Any]"]


def session(worker: int = 0, workers: int = 2, **settings: Any) -> Session:
    run = Run(worker=worker, workers=workers, shards=("inproc://nobody",), **settings)
    return Session(run, "1", EventLog(None, "test"))


def seed_differently(worker: int) -> None:
    random.seed(worker)
    np.random.seed(worker)
    torch.manual_seed(worker)


def go_through(build: Build, workers: int = 2, epochs: int = 1, **given: Any) -> list[list[list[Any]]]:
    """For each worker, each epoch's batches. Every worker's generators are at another place."""
    found = []
    for worker in range(workers):
        seed_differently(worker)
        loader = split_for(session(worker, workers), build(), **given)
        found.append([list(loader) for _ in range(epochs)])
    return found


def rounds(found: list[list[list[Any]]], epoch: int = 0) -> list[Any]:
    """The batches of an epoch, round by round, in the order of the workers."""
    return [batch for turn in zip(*(own[epoch] for own in found), strict=True) for batch in turn]


def loader(**given: Any) -> "DataLoader[Any]":
    return DataLoader(DATA, collate_fn=list, **{"batch_size": 2, **given})


class Drawing(Sampler[int]):
    """Draws its order from one of the process's generators."""

    def __init__(self, draw: Callable[[], list[int]]) -> None:
        self.draw = draw

    def __len__(self) -> int:
        return len(DATA)

    def __iter__(self) -> Iterator[int]:
        yield from self.draw()


class Grouped(Sampler[list[int]]):
    """Batches of different sizes in an order of their own, as by the length of samples."""

    def __iter__(self) -> Iterator[list[int]]:
        groups = [DATA[:3], DATA[3:4], DATA[4:9], DATA[9:11], DATA[11:]]
        random.shuffle(groups)
        yield from groups

    def __len__(self) -> int:
        return 5


class Endless(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        while True:
            yield random.randrange(100)


ORDERS: dict[str, Build] = {
    "in order": loader,
    "shuffled": lambda: loader(shuffle=True),
    "shuffled, own generator": lambda: loader(
        shuffle=True, generator=torch.Generator().manual_seed(random.randrange(9**9))
    ),
    "random sampler": lambda: loader(sampler=RandomSampler(DATA, replacement=True, num_samples=40)),
    "weighted": lambda: loader(sampler=WeightedRandomSampler([1.0] * 22, 30)),
    "subset": lambda: loader(sampler=SubsetRandomSampler(DATA[3:19])),
    "by random": lambda: loader(sampler=Drawing(lambda: random.sample(DATA, 22))),
    "by NumPy": lambda: loader(sampler=Drawing(lambda: np.random.permutation(22).tolist())),
    "by torch": lambda: loader(sampler=Drawing(lambda: torch.randperm(22).tolist())),
    "a list": lambda: loader(sampler=DATA[::-1]),
    "batch sampler": lambda: loader(
        batch_size=1, batch_sampler=BatchSampler(RandomSampler(DATA), 3, drop_last=True)
    ),
}


# Samplers that draw with replacement.
REPEATING = ("random sampler", "weighted")


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("name", ORDERS)
def test_workers_take_turns_in_one_order(name: str, workers: int) -> None:
    sampler = ORDERS[name]().batch_sampler
    assert isinstance(sampler, BatchSampler)
    found = go_through(ORDERS[name], workers, epochs=2)
    joined, total, size = rounds(found), len(sampler.sampler), sampler.batch_size  # type: ignore[arg-type]
    whole, rest = divmod(total, size * workers)
    assert len(joined) == (whole + (rest > 0 and not sampler.drop_last)) * workers
    assert {len(batch) for batch in joined} == {size}
    flat = [sample for batch in joined for sample in batch]
    assert flat[total:] == flat[: len(flat[total:])]
    if name not in REPEATING:
        assert len(set(flat)) == min(total, len(flat))
    assert (rounds(found, 1) == joined) == (name in ("in order", "a list"))
    if name == "in order":
        assert flat[:total] == DATA


def test_the_order_follows_from_the_seed() -> None:
    shuffled = ORDERS["shuffled"]
    first = go_through(shuffled, epochs=2)
    assert go_through(shuffled, epochs=2, seed=0) == first
    assert go_through(shuffled, epochs=2, seed=1) != first
    assert go_through(shuffled, seed=-1) != go_through(shuffled, seed=1)


def test_batches_of_a_samplers_own_stay_whole() -> None:
    found = go_through(lambda: DataLoader(DATA, collate_fn=list, batch_sampler=Grouped()))
    joined = rounds(found)
    assert len(joined) == 6
    assert joined[5] == joined[0]  # of the epoch's start
    assert sorted(map(len, joined[:5])) == [1, 2, 3, 5, 11]
    uneven = go_through(lambda: DataLoader(DATA, collate_fn=list, batch_sampler=Grouped()), end="uneven")
    assert [len(own[0]) for own in uneven] == [3, 2]
    assert (
        rounds(go_through(lambda: DataLoader(DATA, batch_sampler=Grouped(), collate_fn=list), end="drop"))
        == (joined[:4])
    )


def test_a_loader_that_makes_no_batches() -> None:
    found = go_through(lambda: DataLoader(DATA[:5], batch_size=None, shuffle=True))
    joined = rounds(found)
    assert (len(joined), set(joined), joined[5]) == (6, set(DATA[:5]), joined[0])


def test_a_sampler_without_end_or_length() -> None:
    def build() -> "DataLoader[Any]":
        return DataLoader(range(100), batch_size=3, sampler=Endless(), collate_fn=list)

    firsts = []
    for worker in range(2):
        seed_differently(worker)
        split = split_for(session(worker), build())
        firsts.append(list(islice(split, 10)))
        with pytest.raises(TypeError):
            len(split)
    assert firsts[0] != firsts[1]
    random.seed(0)
    alone = list(islice(split_for(session(0, 1, every=1, checkpoint="unused"), build()), 20))
    assert [batch for turn in zip(*firsts, strict=True) for batch in turn] == alone


@pytest.mark.parametrize("end", [None, "fill", "drop", "uneven"])
@pytest.mark.parametrize("drop_last", [False, True])
def test_length_and_end(end: Any, drop_last: bool) -> None:
    def build() -> "DataLoader[Any]":
        return loader(batch_size=4, drop_last=drop_last)

    found = go_through(build, end=end)
    for worker, own in enumerate(found):
        assert len(split_for(session(worker), build(), end=end)) == len(own[0])
    kept = end or ("drop" if drop_last else "fill")
    last = {"fill": [[16, 17, 18, 19], [20, 21, 0, 1]], "drop": [[8, 9, 10, 11], [12, 13, 14, 15]]}
    assert [own[0][-1] for own in found] == last.get(kept, [[16, 17, 18, 19], [20, 21]])


def test_too_little_for_a_round_is_refused_where_it_would_be_dropped() -> None:
    with pytest.raises(UsageError, match="22 samples make no round of 12 for each of 2 workers"):
        split_for(session(), loader(batch_size=12, drop_last=True))
    assert len(split_for(session(), loader(batch_size=12))) == 1


# What is not this function's to change.


def test_generators_are_as_with_the_loader_itself() -> None:
    def after(make: Callable[["DataLoader[Any]"], "DataLoader[Any]"]) -> tuple[Any, ...]:
        seed_differently(5)
        chosen = make(loader())
        for _ in range(2):
            list(chosen)
        return random.random(), float(np.random.random()), float(torch.rand(()))

    assert after(lambda own: split_for(session(), own)) == after(lambda own: own)


def test_everything_it_was_built_with_is_kept() -> None:
    def collate(samples: list[int]) -> list[int]:
        return samples

    def begin(worker: int) -> None: ...

    given: dict[str, Any] = {
        "batch_size": 2,
        "num_workers": 2,
        "collate_fn": collate,
        "pin_memory": True,
        "drop_last": True,
        "timeout": 30,
        "worker_init_fn": begin,
        "multiprocessing_context": "spawn",
        "generator": torch.Generator(),
        "prefetch_factor": 3,
        "persistent_workers": True,
        "in_order": False,
    }
    plain = DataLoader(DATA, shuffle=True, **given)
    split = split_for(session(), plain)
    assert split is not plain
    for name in given:
        assert getattr(split, name) == getattr(plain, name), name
    assert (split.dataset, split.sampler) == (plain.dataset, plain.sampler)
    assert type(plain.batch_sampler) is BatchSampler


def test_a_class_of_the_users_stays_one() -> None:
    class Own(DataLoader[Any]):
        def __init__(self, path: str) -> None:
            super().__init__(DATA, batch_size=2, collate_fn=list)
            self.path = path

        def __iter__(self) -> Iterator[Any]:
            for batch in super().__iter__():
                yield (self.path, batch)

    split = split_for(session(1), Own("here"))
    assert isinstance(split, Own)
    assert type(split).__name__ == "Own"
    assert next(iter(split)) == ("here", [2, 3])


def test_processes_of_a_loader_bring_the_same_batches() -> None:
    found = go_through(lambda: loader(shuffle=True), epochs=2)
    assert go_through(lambda: loader(shuffle=True, num_workers=2), epochs=2) == found
    assert go_through(lambda: loader(shuffle=True, num_workers=1, persistent_workers=True), epochs=2) == found


# Loaders that are returned as they are.


def test_a_world_of_one_changes_nothing() -> None:
    for plain in (loader(shuffle=True), DataLoader(Stream(5))):
        assert split_for(session(0, 1), plain) is plain


def test_what_is_split_already_is_returned() -> None:
    here = session(1)
    for plain in (
        loader(sampler=DistributedSampler(DATA, 2, 1)),
        DataLoader(DATA, batch_sampler=BatchSampler(DistributedSampler(DATA, 2, 1), 2, drop_last=False)),
        DataLoader(DATA, batch_sampler=Batches(here, 22, 2, shuffle=True, seed=0)),
        split_for(here, loader()),
    ):
        assert split_for(here, plain) is plain


@pytest.mark.parametrize(("replicas", "rank"), [(1, 0), (2, 0), (4, 1)])
def test_another_workers_part_is_refused(replicas: int, rank: int) -> None:
    with pytest.raises(UsageError, match=f"part {rank} of {replicas}, by its `DistributedSampler`") as caught:
        split_for(session(1), loader(sampler=DistributedSampler(DATA, replicas, rank)))
    assert "`num_replicas` and `rank`" in caught.value.hint


@pytest.mark.parametrize("given", [DATA, [[1, 2], [3, 4]], iter(DATA), None])
def test_what_is_no_loader_is_refused(given: Any) -> None:
    with pytest.raises(UsageError, match="`split` was given a"):
        split_for(session(), given)


def test_an_unknown_end_is_refused() -> None:
    with pytest.raises(UsageError, match="end=`even`"):
        split_for(session(), loader(), end="even")  # type: ignore[arg-type]


# Streams.


class Stream(IterableDataset[int]):
    """Counts; its processes in a loader share the numbers if they are told to."""

    def __init__(self, total: int, *, shuffle: bool = False, shared: bool = False) -> None:
        self.total = total
        self.shuffle = shuffle
        self.shared = shared
        self.start, self.step = 0, 1

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        if self.shared and info is not None:
            self.start, self.step = info.id, info.num_workers
        numbers = list(range(self.start, self.total, self.step))
        if self.shuffle:
            random.shuffle(numbers)
        yield from numbers


class Sized(Stream):
    def __len__(self) -> int:
        return self.total


def stream(data: "IterableDataset[int]", **given: Any) -> "DataLoader[Any]":
    return DataLoader(data, collate_fn=list, **{"batch_size": 2, **given})


@pytest.mark.parametrize(
    ("end", "want"),
    [
        (None, [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [10, 0]]]),
        ("drop", [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]),
        ("uneven", [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [10]]]),
    ],
)
def test_each_worker_takes_its_batches_of_a_stream(end: Any, want: list[list[list[int]]]) -> None:
    found = go_through(lambda: stream(Sized(11)), end=end)
    assert [own[0] for own in found] == want
    for worker, own in enumerate(want):
        split = split_for(session(worker), stream(Sized(11)), end=end)
        assert len(split) == len(own)
    dropping = go_through(lambda: stream(Stream(11), drop_last=True))
    assert [own[0] for own in dropping] == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    single = go_through(lambda: DataLoader(Stream(3), batch_size=None))
    assert [own[0] for own in single] == [[0, 2], [1, 0]]
    with pytest.raises(TypeError):
        len(split_for(session(), stream(Stream(11))))


@pytest.mark.parametrize(
    "given",
    [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}],
    ids=["here", "processes", "processes that stay"],
)
def test_a_stream_that_shuffles_has_one_order_for_all_and_another_each_epoch(given: dict[str, Any]) -> None:
    found = go_through(lambda: stream(Stream(24, shuffle=True, shared=True), **given), epochs=3)
    for epoch in range(3):
        flat = [sample for batch in rounds(found, epoch) for sample in batch]
        assert sorted(flat) == list(range(24))
    assert len({str(rounds(found, epoch)) for epoch in range(3)}) == 3


def share_out(process: int) -> None:
    """What torch's documentation does in a loader's processes."""
    info = get_worker_info()
    assert info is not None
    data: Any = info.dataset
    data.start, data.step = info.id, info.num_workers


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_a_process_of_a_loader_may_set_what_the_stream_reads(context: str) -> None:
    found = go_through(
        lambda: stream(Stream(16), num_workers=2, worker_init_fn=share_out, multiprocessing_context=context)
    )
    assert sorted(sample for batch in rounds(found) for sample in batch) == list(range(16))


def test_a_streams_attributes_are_its_own() -> None:
    plain = Stream(12)
    split = split_for(session(), stream(plain))
    data: Any = split.dataset
    data.total = 4
    assert (plain.total, data.step, list(split)) == (4, 1, [[0, 1]])
    with pytest.raises(AttributeError, match="nothing"):
        _ = data.nothing


# Where a resumed run goes on.


def train_on(here: Session, split: "DataLoader[Any]", count: int) -> Iterator[Any]:
    """Hand batches out, with a training pass for each."""
    for batch in islice(split, count):
        here.forwards += 1
        yield batch


def saved(here: Session) -> WorkerState:
    return WorkerState(position=here.position(), places=here.all_places())


BUILDS: dict[str, Build] = {
    "samples": lambda: loader(shuffle=True),
    "processes": lambda: loader(shuffle=True, num_workers=2),
    "a stream": lambda: stream(Stream(22, shuffle=True)),
}


@pytest.mark.parametrize("name", BUILDS)
def test_a_resumed_run_goes_on_behind_the_last_batch(name: str) -> None:
    build, here = BUILDS[name], session(1)
    split = split_for(here, build())
    epochs = [list(train_on(here, split, 99)) for _ in range(2)]
    rest = iter(split)
    third = [next(rest), next(rest)]
    here.forwards += 2
    state = saved(here)
    assert (state.position, state.places) == ((2, 2), [(2, 2)])
    third += list(rest)
    epochs += [third, list(train_on(here, split, 99))]

    again = session(1)
    resumed = split_for(again, build())
    again.resumed = state  # found out by `wrap`, which may come later
    assert len(list(islice(resumed, 1))) == 1  # a look at the first one
    assert list(train_on(again, resumed, 99)) == epochs[2][2:]
    assert again.all_places() == [(3, 0)]
    assert list(train_on(again, resumed, 99)) == epochs[3]


def test_batches_that_were_only_handed_out_are_not_counted() -> None:
    here = session()
    split = split_for(here, loader())
    batches = iter(split)
    for _ in range(4):
        next(batches)
    here.forwards += 2
    assert here.all_places() == [(0, 2)]
    here.forwards += 20  # several passes for a batch
    assert here.all_places() == [(0, 4)]


def test_the_last_batch_ends_the_epoch() -> None:
    here = session()
    split = split_for(here, loader(batch_size=11))
    batches = iter(split)
    next(batches)
    here.forwards += 1
    assert here.position() == (1, 0)


def test_a_look_at_the_first_batches_is_no_epoch_and_training_on_some_is_one() -> None:
    here = session()
    split = split_for(here, loader(shuffle=True))
    first = next(iter(split))
    assert next(iter(split)) == first
    trained = list(train_on(here, split, 2))
    assert trained[0] == first
    assert here.all_places() == [(1, 0)]
    assert next(iter(split)) != first
    left = iter(split)  # left where it is, not closed
    next(left)
    here.forwards += 1
    second = next(iter(split))
    assert here.all_places() == [(2, 0)]
    assert second == next(iter(split))
    left.close()  # type: ignore[attr-defined]
    assert here.all_places() == [(2, 0)]


def test_each_loader_has_a_place_and_the_one_that_was_used_last_is_the_runs() -> None:
    here = session()
    train, other, check = (split_for(here, loader(shuffle=True)) for _ in range(3))
    for _, _ in zip(train, other, strict=True):
        here.forwards += 1
    batches = iter(train)
    for _ in range(2):
        next(batches)
        here.forwards += 1
    list(check)
    next(batches)
    here.forwards += 1
    assert here.all_places() == [(1, 3), (1, 0), (1, 0)]
    assert here.position() == (1, 3)


def test_a_batch_sampler_of_the_runs_own_keeps_the_position() -> None:
    here = session()
    Batches(here, 22, 2, shuffle=True, seed=0)
    list(split_for(here, loader()))
    assert here.position() == (0, 0)


def test_tensors_are_collated_as_ever() -> None:
    data = TensorDataset(torch.arange(8.0), torch.arange(8))
    (x, y), *_ = split_for(session(1), DataLoader(data, batch_size=2))
    assert (x.tolist(), y.tolist()) == ([2.0, 3.0], [2, 3])
    assert isinstance(DataLoader(data).sampler, SequentialSampler)
