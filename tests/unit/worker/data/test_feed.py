"""Batches come as the loader gives them, and on the device."""

from collections import namedtuple

import pytest
import torch

from shoestring.errors import UsageError
from shoestring.worker.data.feed import feed

Pair = namedtuple("Pair", "x y")
NESTED = [
    torch.arange(6).reshape(2, 3),
    (torch.ones(2), [torch.zeros(1), "name"], {"mask": torch.tensor([True]), "count": 3}),
    Pair(torch.ones(2), None),
]


def same(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a.cpu(), b.cpu())
    if isinstance(a, tuple | list):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return a == b


def test_batches_keep_their_order_and_nesting():
    assert all(map(same, list(feed(NESTED, "cpu")), NESTED))
    assert list(feed([], "cpu")) == []


def test_batches_are_moved():
    (moved,) = feed([(torch.zeros(2), 1)], torch.device("meta"))
    assert moved[0].device.type == "meta"
    assert moved[1] == 1


def test_on_the_cpu_nothing_is_fetched_ahead():
    fetched = []

    def loader():
        for number in range(3):
            fetched.append(number)
            yield torch.tensor(number)

    for number, batch in enumerate(feed(loader(), "cpu")):
        assert batch == number
        assert fetched == list(range(number + 1))


def test_nothing_ahead_is_refused():
    with pytest.raises(UsageError, match="`ahead` is 0"):
        feed([], "cpu", ahead=0)
