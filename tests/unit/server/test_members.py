"""Who takes part."""

import pytest

from shoestring.errors import JoinError, StaleWorkerError
from shoestring.server.members import Members
from tests.unit.server.talk import hello_of


def joined(*workers: int, of: int = 2) -> Members:
    members = Members(20.0)
    for worker in workers:
        members.enter(members.greet(hello_of(worker, of, 1), 0, b"%d.1" % worker, 0.0), 1)
    return members


def test_nothing_is_due_before_all_have_entered():
    members = Members(20.0)
    assert members.due(1) is None
    first = members.greet(hello_of(1, 2, 1), 0, b"b", 0.0)
    members.greet(hello_of(0, 2, 1), 0, b"a", 0.0)
    members.enter(first, 1)
    assert members.due(1) is None
    members.enter(members.of(b"a", 0.0), 3)
    assert (members.due(1), members.due(2), members.due(3)) == ([1], [1], [0, 1])
    assert members.first_entry() == 1


def test_the_lease_is_renewed_by_every_message_and_takes_out_whoever_is_silent():
    members = joined(0, 1)
    members.of(b"0.1", 15.0)
    assert members.lapse(20.0) == []
    assert [member.worker for member in members.lapse(20.5)] == [1]
    assert members.lapse(20.5) == []
    assert members.due(1) == [0]
    with pytest.raises(StaleWorkerError, match="20 s"):
        members.of(b"1.1", 21.0)
    with pytest.raises(StaleWorkerError):
        members.greet(hello_of(1, 2, 1), 0, b"1.1", 21.0)  # the same life does not come back
    members.enter(members.greet(hello_of(1, 2, 2), 0, b"1.2", 22.0), 9)
    assert (members.due(8), members.due(9)) == ([0], [0, 1])
    assert members.first_entry() == 1


def test_a_worker_that_only_said_hello_has_no_lease():
    members = Members(20.0)
    members.greet(hello_of(0, 1, 1), 0, b"a", 0.0)
    assert members.lapse(1e9) == []
    assert members.first_entry() is None


def test_the_older_of_two_processes_under_one_id_is_refused():
    members = joined(0, 1)
    with pytest.raises(StaleWorkerError, match="later process"):
        members.greet(hello_of(0, 2, 0), 0, b"0.0", 1.0)
    new = members.greet(hello_of(0, 2, 5), 0, b"0.5", 1.0)
    assert members.of(b"0.5", 2.0) is new is members.get(0)
    with pytest.raises(StaleWorkerError, match="taken this worker's place"):
        members.of(b"0.1", 2.0)
    assert [member.incarnation for member in members] == [5, 1]


def test_a_late_hello_of_a_replaced_process_does_not_bring_it_back():
    members = joined(0, 1)
    hello = hello_of(0, 2, 1)  # of a process that no launcher has told apart from the one before
    hello.life = "new"
    new = members.greet(hello, 1, b"0.new", 1.0)
    with pytest.raises(StaleWorkerError, match="later process"):
        members.greet(hello_of(0, 2, 1), 1, b"0.1", 2.0)
    assert members.of(b"0.new", 2.0) is new


def test_one_life_may_come_over_another_connection_but_two_workers_not_over_one():
    members = joined(0, 1)
    assert members.greet(hello_of(0, 2, 1), 0, b"again", 1.0) is members.of(b"again", 1.0)
    with pytest.raises(JoinError):
        members.of(b"0.1", 1.0)
    with pytest.raises(JoinError, match="connection of worker 1"):
        members.greet(hello_of(0, 2, 9), 0, b"1.1", 1.0)


def test_connections_are_not_remembered_for_ever():
    members = joined(0, of=1)
    for life in range(2, 1000):
        members.greet(hello_of(0, 1, life), 0, b"0.%d" % life, 0.0)
        members.greet(hello_of(0, 1, life), 0, b"x.%d" % life, 0.0)
    assert len(members._by_identity) == 1
    assert len(members._replaced) <= 64


@pytest.mark.parametrize(("worker", "workers"), [(0, 3), (2, 2), (-1, 2), (0, 0), (5, 2**40)])
def test_a_number_that_does_not_fit_is_refused(worker, workers):
    with pytest.raises(JoinError):
        joined(0, 1).greet(hello_of(worker, workers, 9), 0, b"x", 0.0)


@pytest.mark.parametrize(("worker", "workers"), [(0, 0), (0, -1), (7, 3), (0, 2**40)])
def test_a_first_hello_that_is_refused_does_not_set_the_size_of_the_run(worker, workers):
    members = Members(20.0)
    with pytest.raises(JoinError):
        members.greet(hello_of(worker, workers, 1), 0, b"x", 0.0)
    assert members.expected == 0
    members.greet(hello_of(0, 2, 1), 0, b"a", 0.0)
    assert members.expected == 2
    with pytest.raises(JoinError, match="not said hello"):
        members.of(b"x", 0.0)


def test_no_clock_takes_part_in_telling_an_older_process_from_a_newer_one():
    """A replacement on a host whose clock is behind takes the place of the process before it."""
    members = Members(20.0)
    first = members.greet(hello_of(0, 1, life="a", incarnation=0), 0, b"0.a", 0.0)
    second = members.greet(hello_of(0, 1, life="b", incarnation=0), first.incarnation, b"0.b", 1.0)
    assert second.incarnation == first.incarnation + 1
    restarted = members.greet(hello_of(0, 1, life="c", incarnation=9), second.incarnation, b"0.c", 2.0)
    assert restarted.incarnation == 9
    with pytest.raises(StaleWorkerError, match="later process"):  # it was started before, and came late
        members.greet(hello_of(0, 1, life="d", incarnation=8), 9, b"0.d", 3.0)
    assert members.of(b"0.c", 4.0) is restarted
