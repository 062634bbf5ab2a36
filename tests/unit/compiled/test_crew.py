"""Threads that share the phases of a call: all of the work is done once, whoever comes, or nobody."""

import os
import threading
from itertools import chain

import numpy as np
import pytest

from shoestring.compiled import crew as crews
from shoestring.compiled.crew import Crew
from shoestring.compiled.turns import take_turn

PIECES = 2000


def take_all(turns) -> list[int]:
    """Take pieces until there are none; return their numbers."""
    mine = []
    while (piece := take_turn(turns)) < PIECES:
        mine.append(piece)
    return mine


def all_of(taken: list[list[int]]) -> list[int]:
    return sorted(chain.from_iterable(taken))


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_every_piece_of_every_phase_is_taken_once(threads):
    for _ in range(20):
        with Crew(threads) as crew:
            for _ in range(5):
                taken = crew.run(threads, take_all)
                assert 1 <= len(taken) <= threads
                assert all_of(taken) == list(range(PIECES))


def test_a_phase_without_pieces_opens_for_helpers_all_the_same():
    """Or one that waits for it would wait in vain, while other calls have none."""
    phase = crews._Phase()
    phase.lead(lambda turns: None)
    assert phase.turns[0] > 0


def test_where_no_thread_can_be_had_the_work_is_done_without(monkeypatch):
    def fail(thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(crews, "_pool", crews._Pool())
    monkeypatch.setattr(threading.Thread, "start", fail)
    with Crew(3) as crew:
        assert crew.run(3, take_all) == [list(range(PIECES))]
    monkeypatch.undo()
    with Crew(3) as crew:
        assert all_of(crew.run(3, take_all)) == list(range(PIECES))


def with_a_helper(work) -> None:
    """Run `work(is_own)` on two threads, again if no helper was there in time: none has to be."""
    own = threading.get_ident()
    for _ in range(50):
        is_there = threading.Event()

        def meet(turns, is_there=is_there) -> None:
            take_turn(turns)
            if threading.get_ident() != own:
                is_there.set()
            if is_there.wait(timeout=1):
                work(threading.get_ident() == own)

        with Crew(2) as crew:
            crew.run(2, meet)
        if is_there.is_set():
            return
    pytest.fail("no helper ever came")


def test_helpers_do_come():
    came = []
    with_a_helper(came.append)
    assert sorted(came) == [False, True]


def test_a_phase_too_small_for_a_helper_calls_none():
    with Crew(2) as crew:
        assert crew.run(1, take_all) == [list(range(PIECES))]
        assert crew._called == 0


def test_a_phase_without_pieces_holds_nobody_up():
    with Crew(3) as crew:
        assert crew.run(3, lambda turns: "nothing to take") == ["nothing to take"]
        assert all_of(crew.run(3, take_all)) == list(range(PIECES))


@pytest.mark.parametrize("is_bad", [True, False])
def test_what_goes_wrong_on_any_thread_is_raised_when_all_are_done(is_bad):
    done = []

    def fail(is_own: bool) -> None:
        if is_own == is_bad:
            raise ValueError("bad")
        done.append(is_own)

    with pytest.raises(ValueError, match="bad"):
        with_a_helper(fail)
    assert done == [not is_bad]
    with Crew(2) as crew:
        assert all_of(crew.run(2, take_all)) == list(range(PIECES))


def test_crews_of_several_threads_at_once():
    results = {}

    def work(name: int) -> None:
        for _ in range(10):
            with Crew(3) as crew:
                for _ in range(3):
                    results.setdefault(name, []).append(all_of(crew.run(3, take_all)))

    threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(taken == list(range(PIECES)) for own in results.values() for taken in own)
    assert len(results) == 4


def test_a_forked_process_has_helpers_of_its_own():
    with Crew(2) as crew:
        crew.run(2, take_all)
    pool = crews._pool
    child = os.fork()
    if child == 0:
        with Crew(2) as crew:
            right = all_of(crew.run(2, take_all)) == list(range(PIECES))
        os._exit(0 if right and crews._pool is not pool else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_turns_share_no_cache_line_with_anything():
    first, second = crews.new_turns(), crews.new_turns()
    assert abs(first.ctypes.data - second.ctypes.data) >= 128
    assert not np.may_share_memory(first, second)
