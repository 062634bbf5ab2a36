"""Which jobs form a group, and which may share a device."""

import numpy as np
import pytest

from shoestring.fleet.allocate import pairing
from shoestring.fleet.allocate.pairing import fits, fits_alone, group, share
from shoestring.fleet.allocate.plan import Demand, Pool
from tests.unit.fleet.allocate.fleets import TablePairs

POOLS = [Pool("fast", 2, 10), Pool("slow", 1, 8)]
PAIRS = TablePairs(
    {
        ("v", "w", "fast"): (0.9, 0.3),
        ("w", "w", "fast"): (0.6, 0.7),
        ("w", "w", "slow"): (0.5, 0.5),  # no gain
    }
)


def job(name, work="w", devices=1, fast=4.0, need=2):
    memory = None if need is None else {"fast": need, "slow": need}
    return Demand(name, work, 100, {"fast": fast, "slow": 1.0}, devices=devices, memory_bytes=memory)


def rows(demands, margin=0.0, ranking=None):
    groups = group(demands, POOLS)
    ranking = range(len(groups.first)) if ranking is None else ranking
    found = share(demands, POOLS, groups, PAIRS, margin, ranking)
    columns = (found.a, found.b, found.kind, found.share_a, found.share_b)
    return [tuple(row) for row in zip(*(column.tolist() for column in columns), strict=True)]


def test_jobs_that_behave_alike_are_one_group():
    demands = [job("a"), job("b", "v"), job("c"), job("d", devices=2), job("e", fast=3.0), job("f", need=3)]
    groups = group(demands, POOLS)
    assert groups.of.tolist() == [0, 1, 0, 2, 3, 4]
    assert groups.first.tolist() == [0, 1, 3, 4, 5]
    assert groups.members(0).tolist() == [0, 2]
    assert group([], POOLS).first.dtype == np.int64


def test_shares_are_asked_once_for_two_groups_and_only_gains_count():
    assert rows([job("a"), job("b", "v"), job("c")]) == [(0, 0, 0, 0.6, 0.7), (0, 1, 0, 0.3, 0.9)]
    assert rows([job("a"), job("b", "v")]) == [(0, 1, 0, 0.3, 0.9)]  # no second job of the first group
    assert rows([job("a", devices=2), job("b", "v")]) == []
    assert rows([job("a", need=6), job("b", need=6)]) == []
    assert rows([job("a", fast=0.0), job("b", fast=0.0)]) == []


def test_with_many_groups_each_meets_the_next_of_the_ranking(monkeypatch):
    demands = [job(str(n), fast=1.0 + n) for n in range(5)]
    assert len(rows(demands)) == 10
    monkeypatch.setattr(pairing, "ALL_PAIRS_UP_TO", 4)
    monkeypatch.setattr(pairing, "PARTNERS", 1)
    assert [row[:2] for row in rows(demands, ranking=[4, 2, 0, 1, 3])] == [(4, 2), (2, 0), (0, 1), (1, 3)]


@pytest.mark.parametrize(
    ("needs", "margin", "is_fitting"),
    [((4, 6), 0.0, True), ((4, 6), 0.1, False), ((4, 5), 0.1, True), ((None, 1), 0.0, False)],
)
def test_two_jobs_fit_with_a_margin(needs, margin, is_fitting):
    one, other = (job(name, need=need) for name, need in zip("ab", needs, strict=True))
    assert fits(one, other, POOLS[0], margin) == is_fitting
    assert fits(one, other, Pool("fast", 1), margin)  # a pool of unknown memory is not checked


def test_one_job_fits_up_to_all_of_the_memory_and_if_its_memory_is_unknown():
    assert [fits_alone(job("a", need=need), POOLS[0]) for need in (10, 11, None)] == [True, False, True]
    assert fits_alone(job("a", need=11), Pool("fast", 1))
