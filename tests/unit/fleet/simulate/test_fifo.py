"""First come, first served as Gavel's simulator does it: ties of jobs to kinds, and turns on a kind."""

from shoestring.fleet.allocate.plan import Demand, Placement, Pool
from shoestring.fleet.simulate.fifo import GavelFifo

ROUND = 100.0


def test_fifo_ties_jobs_to_kinds_from_the_end_of_the_alphabet():
    fifo = GavelFifo([Pool("a", 2), Pool("b", 2)], ROUND, seed=0)
    demands = [Demand(str(n), "w", 100, {"a": 1.0, "b": 2.0}) for n in range(6)]
    for demand in demands:
        fifo.note_start(demand.job)
    placed = fifo.decide(5.0, demands)
    # With seed 0 the draw strikes off `b`, which is full, so `a` comes next; when it is full too,
    # it is the only one left, and who still waits is not tied at all.
    assert [(place.kind, *place.jobs) for place in placed] == [("a", "2"), ("a", "3"), ("b", "0"), ("b", "1")]
    for place in placed:
        fifo.note_run(place.jobs[0], place.kind, ROUND)
    assert [place.jobs for place in fifo.decide(ROUND, demands)] == [place.jobs for place in placed]
    fifo.note_end("0")
    left = demands[1:]
    assert ("4",) not in [place.jobs for place in fifo.decide(2 * ROUND, left)]
    later = fifo.decide(1925.0, left)
    assert Placement("b", ("4",), 1, (2.0,)) in later  # the heir, once 1920 s have passed


def tie(seed):
    fifo = GavelFifo([Pool(kind, 1) for kind in "abc"], ROUND, seed)
    demands = [Demand(str(n), "w", 1000, dict.fromkeys("abc", 1.0)) for n in range(3)]
    for demand in demands:
        fifo.note_start(demand.job)
    return fifo, demands, fifo.decide(5.0, demands)


def test_fifo_takes_turns_on_a_kind_that_is_tied_too_often():
    # A seed that strikes off the kind with room: all who wait are tied to the full one.
    seed = next(seed for seed in range(50) if {place.kind for place in tie(seed)[2]} == {"c"})
    fifo, demands, _ = tie(seed)
    turns = []
    for number in range(6):
        (place,) = fifo.decide(5.0 + number * ROUND, demands)
        fifo.note_run(place.jobs[0], place.kind, ROUND)
        turns.append(place.jobs[0])
    assert turns == ["0", "1", "2", "0", "1", "2"]
