"""Each push counts once, in the life of the worker that sent it."""

import pytest

from shoestring.errors import StaleWorkerError
from shoestring.server.ledger import Mark, PushLedger, Verdict


def test_verdicts_in_order():
    ledger = PushLedger()
    assert ledger.judge(0, 1, 1) is Verdict.EARLY  # it has not entered
    ledger.enter(0, 1, 5)
    assert [ledger.judge(0, 1, seq) for seq in (4, 5, 6)] == [Verdict.REPEAT, Verdict.APPLY, Verdict.EARLY]
    ledger.record(0, 1, 5)
    assert [ledger.judge(0, 1, seq) for seq in (5, 6, 7)] == [Verdict.REPEAT, Verdict.APPLY, Verdict.EARLY]
    assert (ledger.seq(0), ledger.seq(1)) == (5, 0)
    assert (ledger.incarnation(0), ledger.incarnation(1)) == (1, 0)


def test_an_older_life_is_refused_and_changes_nothing():
    ledger = PushLedger({0: Mark(7, 3)})
    for call in (ledger.judge, ledger.enter):
        with pytest.raises(StaleWorkerError):
            call(0, 6, 4)
    with pytest.raises(StaleWorkerError):
        ledger.refuse_older(0, 6)
    ledger.record(0, 6, 9)  # it was being applied when the next life began
    assert ledger.marks() == {0: Mark(7, 3)}


def test_entering_again_makes_no_push_new():
    ledger = PushLedger()
    ledger.enter(0, 1, 1)
    ledger.record(0, 1, 8)
    ledger.enter(0, 1, 1)
    assert ledger.judge(0, 1, 8) is Verdict.REPEAT
    ledger.enter(0, 2, 4)  # another life may begin anywhere
    assert ledger.judge(0, 2, 4) is Verdict.APPLY


def test_marks_are_all_there_is_and_do_not_grow():
    ledger = PushLedger()
    for life in range(1, 50):
        ledger.enter(0, life, life)
        ledger.record(0, life, life)
    assert ledger.marks() == {0: Mark(49, 49)}
    copy = PushLedger(ledger.marks())
    ledger.record(0, 49, 50)
    assert copy.seq(0) == 49
