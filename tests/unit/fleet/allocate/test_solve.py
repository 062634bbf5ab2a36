"""The relaxed problem, whole choices from it, and greedy ones, on columns small enough to see through."""

import math

import numpy as np
import pytest

from shoestring.fleet.allocate.columns import Columns
from shoestring.fleet.allocate.solve import choose_greedily, fill, relax, settle


def columns(*rows):
    """From rows of kind, job, second job or -1, devices and worth."""
    kind, a, b, devices, worth = (np.array(column) for column in zip(*rows, strict=True))
    ones = np.ones(len(rows))
    return Columns(kind, a, b, devices, ones, ones, worth.astype(float))


# Two devices of one kind: greedily the gang of two, which is worth most a device, blocks both others.
GANG = columns((0, 0, -1, 2, 10.0), (0, 1, -1, 1, 4.9), (0, 2, -1, 1, 4.8))
# Three jobs in pairs on three devices: only one pair fits beside a job alone.
PAIRS = columns((0, 0, 1, 1, 6.0), (0, 1, 2, 1, 6.0), (0, 0, 2, 1, 6.0), (0, 2, -1, 1, 1.0))


def test_the_relaxed_problem_bounds_and_prices():
    counts = np.array([3])
    relaxed = relax(PAIRS, 3, counts, math.inf)
    assert relaxed.worth == pytest.approx(9.0)  # half of every pair
    assert relaxed.taken.tolist() == pytest.approx([0.5, 0.5, 0.5, 0.0])
    assert relaxed.claim.sum() + relaxed.rent @ counts == pytest.approx(relaxed.worth)
    assert (PAIRS.gain(relaxed.claim, relaxed.rent) <= 1e-9).all()
    spread = relaxed.spread(np.array([0, 2, 3, 4]), 5)
    assert spread.taken.tolist() == pytest.approx([0.5, 0.0, 0.5, 0.5, 0.0])


def test_without_time_there_is_no_relaxed_solution():
    assert relax(PAIRS, 3, np.array([3]), -math.inf) is None


def test_a_whole_choice_is_the_best_one():
    counts = np.array([3])
    relaxed = relax(PAIRS, 3, counts, math.inf)
    chosen = settle(PAIRS, relaxed, 3, counts, math.inf)
    assert PAIRS.worth[chosen].sum() == 7.0  # the first two jobs as a pair, the third alone
    assert chosen.tolist() == [0, 3]


def test_a_greedy_choice_takes_the_most_worth_a_device():
    assert choose_greedily(GANG, 3, np.array([2])).tolist() == [0]
    assert choose_greedily(GANG, 3, np.array([3])).tolist() == [0, 1]
    assert choose_greedily(GANG, 3, np.array([1])).tolist() == [1]


def test_filling_up_leaves_what_was_chosen():
    assert fill(GANG, np.array([2]), 3, np.array([2])).tolist() == [1, 2]
    assert fill(GANG, np.array([1, 2]), 3, np.array([2])).tolist() == [1, 2]
