"""Every sample at most once an epoch, and the same global batches for any number of workers."""

import pytest

from shoestring.checkpoint.worker import WorkerState
from shoestring.config import Run
from shoestring.errors import UsageError
from shoestring.observe.events import EventLog
from shoestring.worker.data.batches import Batches, Position
from shoestring.worker.session import Session


def make(
    worker: int = 0,
    workers: int = 1,
    samples: int = 103,
    size: int = 6,
    *,
    shuffle: bool = True,
    seed: int = 0,
) -> Batches:
    run = Run(worker=worker, workers=workers, shards=("inproc://nobody",))
    return Batches(Session(run, "1", EventLog(None, "test")), samples, size, shuffle=shuffle, seed=seed)


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_workers_share_one_order(workers: int) -> None:
    whole = list(make(size=12))
    shares = [list(make(worker, workers, size=12 // workers)) for worker in range(workers)]
    joined = [[i for share in shares for i in share[k]] for k in range(len(whole))]
    assert joined == whole
    assert len({i for batch in whole for i in batch}) == 12 * len(whole) == 96


def test_epochs_differ_and_repeat_from_the_seed() -> None:
    first, again, other = make(), make(), make(seed=1)
    epochs = [list(first), list(first)]
    assert epochs == [list(again), list(again)]
    assert epochs[0] != epochs[1]
    assert epochs[0] != list(other)
    assert next(iter(make(shuffle=False))) == [0, 1, 2, 3, 4, 5]


def test_the_place_counts_what_was_trained_on_not_what_was_fetched() -> None:
    batches = make()
    fetched = iter(batches)
    for _ in range(5):
        next(fetched)
    batches._here.forwards += 2
    assert batches.where() == Position(0, 2)
    batches._here.forwards += len(batches) - 2
    assert batches.where() == Position(1, 0)


def test_a_resumed_run_goes_on_behind_the_last_batch() -> None:
    whole = make()
    epochs = [list(whole), list(whole), list(whole)]
    here = Session(Run(), "1", EventLog(None, "test"), resumed=WorkerState(position=(1, 4)))
    resumed = Batches(here, 103, 6, shuffle=True, seed=0)
    assert list(resumed) == epochs[1][4:]
    assert list(resumed) == epochs[2]


def test_too_few_samples_are_refused() -> None:
    with pytest.raises(UsageError, match="make no batch"):
        make(samples=5)


def test_a_sampler_made_before_wrap_goes_on_behind_the_last_batch_too() -> None:
    here = Session(Run(), "1", EventLog(None, "test"))
    early = Batches(here, 103, 6, shuffle=True, seed=0)
    here.resumed = WorkerState(position=(1, 4))  # found out by `wrap`
    late = Batches(here, 103, 6, shuffle=True, seed=0)
    assert list(early) == list(late)
    assert len(list(Batches(here, 103, 6, shuffle=True, seed=0))) == len(early) - 4
