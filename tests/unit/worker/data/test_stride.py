"""Workers take turns; at the end of an epoch all have had equally many, unless one asks for less."""

from collections.abc import Callable
from itertools import chain, islice

import pytest

from shoestring.worker.data.stride import End, Stride

CASES = [(total, workers, size) for total in range(14) for workers in (1, 2, 3) for size in (1, 2, 3)]


def source(total: int) -> Callable[[int], list[int]]:
    left = iter(range(total))
    return lambda count: list(islice(left, count))


def batches(total: int, workers: int, size: int, end: End) -> list[list[list[int]]]:
    """The batches of every worker."""
    return [list(Stride(worker, workers, size, end).batches(source(total))) for worker in range(workers)]


@pytest.mark.parametrize(
    ("end", "want"),
    [
        ("fill", [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [10, 0]]]),
        ("drop", [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]),
        ("uneven", [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [10]]]),
    ],
)
def test_a_last_round_that_is_not_whole(end: End, want: list[list[list[int]]]) -> None:
    assert batches(11, 2, 2, end) == want


def test_a_worker_that_has_nothing_in_the_last_round() -> None:
    assert batches(5, 2, 2, "fill") == [[[0, 1], [4, 0]], [[2, 3], [1, 2]]]
    assert batches(5, 2, 2, "uneven") == [[[0, 1], [4]], [[2, 3]]]


def test_fewer_samples_than_a_round_are_repeated() -> None:
    assert batches(2, 2, 3, "fill") == [[[0, 1, 0]], [[1, 0, 1]]]


@pytest.mark.parametrize(("total", "workers", "size"), CASES)
def test_rounds_are_the_order_of_one_process(total: int, workers: int, size: int) -> None:
    order = list(range(total))
    for end in ("fill", "drop", "uneven"):
        found = batches(total, workers, size, end)
        rounds = max(map(len, found))
        joined = [sample for k in range(rounds) for own in found for sample in chain(*own[k : k + 1])]
        whole = total // (workers * size) * workers * size
        assert joined[: len(order)] == (order if end != "drop" else order[:whole])
        if end != "uneven":
            assert {len(own) for own in found} == {rounds}
            assert {len(batch) for own in found for batch in own} <= {size}
        assert joined[total:] == [order[k % total] for k in range(len(joined) - total)]


@pytest.mark.parametrize("end", ["fill", "drop", "uneven"])
@pytest.mark.parametrize(("total", "workers", "size"), CASES)
def test_how_many_there_are_is_known_before(end: End, total: int, workers: int, size: int) -> None:
    for worker, own in enumerate(batches(total, workers, size, end)):
        assert Stride(worker, workers, size, end).samples(total) == sum(map(len, own))
