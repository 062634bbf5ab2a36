"""The rounds of one part."""

import math

import numpy as np
import pytest

from shoestring.errors import (
    CodecError,
    ShoestringError,
    StaleWorkerError,
    StreamError,
    UsageError,
    WireError,
)
from shoestring.model.parts import pack_used, unpack_used
from shoestring.model.rules import Rule
from shoestring.server.holding import Holding
from shoestring.server.ledger import PushLedger
from shoestring.server.members import Members
from shoestring.server.rounds import AHEAD, LOG_LIMIT, PartRounds
from shoestring.wire import frames
from shoestring.wire import messages as say
from tests.unit.server.talk import PARTS, SGD, gradient, hello_of, push_of

PART = PARTS[0]
OLD, NEW = say.Decisions(delay=say.Delay(4, 0)), say.Decisions(delay=say.Delay(4, 1))


class Room:
    """The rounds of a part, and members to push to it."""

    def __init__(self, workers: int = 2, rule: Rule = SGD, clip: bool = False) -> None:
        self.members = Members(20.0)
        self.rounds = PartRounds(Holding(PART, rule, [0] * len(PART.pieces)), PushLedger(), clip)
        for worker in range(workers):
            self.enter(worker, workers=workers)

    def enter(self, worker: int, life: int = 1, first: int = 1, workers: int = 2) -> None:
        identity = b"%d.%d" % (worker, life)
        hello = hello_of(worker, workers, life)
        self.members.enter(self.members.greet(hello, 0, identity, 0.0), first)
        self.rounds.enter(worker, life, first)

    def leave(self, worker: int) -> None:
        self.members.get(worker).present = False
        self.rounds.forget(worker)

    def push(self, worker: int, seq: int, **changed) -> bool:
        return self.rounds.push(*push_of(0, worker, seq, **changed))

    def work(self):
        """Compute one update if there is one."""
        work = self.rounds.next_work(self.members)
        if work is None:
            return None
        work.run()
        return self.rounds.finish(work)

    def release(self):
        present = [member.worker for member in self.members if member.present]
        return [
            (worker, seq, [reply.version for reply in replies])
            for worker, seq, replies in self.rounds.release(present)
        ]


def test_a_round_waits_for_all_and_sums_in_worker_order():
    outcomes = []
    for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
        room = Room(workers=3)
        for place, worker in enumerate(order):
            assert room.rounds.next_work(room.members) is None, f"after {place} pushes"
            assert room.push(worker, 1, weight=worker + 0.5) is False
        reply = room.work()
        assert (reply.version, reply.seq, room.rounds.round) == (1, 1, 1)
        outcomes.append(reply.payload.tobytes())
    assert outcomes[0] == outcomes[1] == outcomes[2]


def test_weights_and_sums_are_float32_in_order():
    room = Room(workers=2, rule=Rule("average"))
    for worker, weight in ((0, 0.3), (1, 1.7)):
        room.push(worker, 1, weight=weight, hyper=[[]])
    room.work()
    total = gradient(0, 0, 1) * np.float32(0.3)
    total += np.float32(1.7) * gradient(0, 1, 1)
    want = np.zeros(PART.size, np.float32)
    want += np.float32(1.0) * (np.float32(1.0 / (0.3 + 1.7)) * total)
    assert room.rounds.holding.params.tobytes() == want.tobytes()


def test_a_push_counts_once_however_often_it_comes():
    room = Room()
    for _ in range(3):
        assert room.push(0, 1) is False
    room.push(1, 1)
    work = room.rounds.next_work(room.members)
    assert [item.worker for item in work.contributions] == [0, 1]
    assert room.push(0, 1) is False  # while it is being applied
    work.run()
    room.rounds.finish(work)
    assert room.push(0, 1) is True
    assert room.rounds.next_work(room.members) is None
    assert room.rounds.version == 1


def test_a_worker_may_be_a_round_ahead_and_no_more():
    room = Room()
    room.push(0, 1)
    room.push(0, 2)
    with pytest.raises(WireError, match="round 3 of part 0, which is at 0"):
        room.push(0, 3)
    room.push(1, 1)
    assert room.work().seq == 1
    assert room.work() is None
    room.push(1, 2)
    assert room.work().seq == 2


def test_a_worker_that_is_gone_is_not_waited_for_but_what_it_pushed_counts():
    room = Room(workers=3)
    room.enter(2, workers=3)
    room.push(0, 1)
    room.push(2, 1)
    assert room.work() is None
    room.leave(1)
    room.leave(2)
    work = room.rounds.next_work(room.members)
    assert [item.worker for item in work.contributions] == [0, 2]


def test_rounds_that_nobody_pushed_are_passed_over():
    """The only worker died between two parts of round 4 and comes back at round 5."""
    room = Room(workers=1)
    for seq in (1, 2, 3):
        room.push(0, seq)
        room.work()
    room.enter(0, life=2, first=5, workers=1)
    assert room.work() is None
    assert (room.rounds.round, room.rounds.version) == (4, 3)
    room.push(0, 5, life=2, have=3)
    assert room.work().seq == 5


def test_a_round_someone_pushed_is_not_passed_over():
    room = Room(workers=2)
    room.push(1, 1)
    room.leave(1)
    room.enter(0, life=2, first=9)
    assert room.work().seq == 1
    assert room.work() is None
    assert room.rounds.round == 8


def test_what_a_former_life_pushed_does_not_stand_in_for_the_new_one():
    room = Room(workers=1)
    room.push(0, 1, decisions=OLD)
    room.push(0, 2, decisions=OLD)
    room.enter(0, life=2, first=1, workers=1)
    assert not room.rounds.has(0, 1)
    assert room.work() is None
    room.push(0, 1, life=2, decisions=NEW)
    assert room.work().decisions == NEW
    with pytest.raises(StaleWorkerError):
        room.push(0, 2)


def test_a_new_life_begins_after_the_round_that_is_being_applied():
    room = Room(workers=1)
    room.push(0, 1)
    work = room.rounds.next_work(room.members)
    assert room.rounds.begun == 1
    room.enter(0, life=2, first=2, workers=1)
    work.run()
    room.rounds.finish(work)
    assert room.rounds.ledger.incarnation(0) == 2
    assert room.push(0, 2, life=2, have=1) is False
    assert room.work().seq == 2


def test_skip_leaves_the_part_as_it_is():
    room = Room()
    room.push(0, 1)
    room.push(1, 1, skip=True)
    before = room.rounds.holding.params.tobytes()
    reply = room.work()
    assert (reply.codec, reply.payload.nbytes, reply.version, reply.is_full) == ("", 0, 1, False)
    assert room.rounds.holding.params.tobytes() == before
    assert room.rounds.holding.steps.tolist() == [0] * len(PART.pieces)


@pytest.mark.parametrize("poison", [np.nan, np.inf, 3e38])
@pytest.mark.parametrize("clip", [False, True])
def test_a_sum_that_is_not_finite_is_skipped(poison, clip):
    room = Room(clip=clip)
    values = np.full(PART.size, poison, np.float32)
    for worker in (0, 1):
        push, _ = push_of(0, worker, 1)
        room.rounds.push(push, values.view(np.uint8).data)
    reply = room.work()
    assert (reply.codec, reply.squares) == ("", 0.0)
    assert not room.rounds.holding.params.any()


def test_a_sum_whose_values_only_add_up_to_infinity_is_applied():
    room = Room(workers=1)
    values = np.full(PART.size, 1e38, np.float32)
    push, _ = push_of(0, 0, 1)
    room.rounds.push(push, values.view(np.uint8).data)
    assert room.work().codec == "float32"


def test_the_cheapest_reply_is_granted():
    room = Room()
    room.push(0, 1, reply="float32", reply_cost=32.0)
    room.push(1, 1, reply="int8", reply_cost=8.0)
    assert room.work().codec == "int8"
    room.push(0, 2, reply="float32", reply_cost=1.0, codec="dct")
    room.push(1, 2, reply="int8", reply_cost=math.nan)
    assert room.work().version == 2


def test_bytes_that_cannot_be_decoded_name_their_worker():
    room = Room()
    room.push(0, 1)
    push, payload = push_of(0, 1, 1, codec="dct")
    room.rounds.push(push, memoryview(bytes(payload)[:-3]))
    work = room.rounds.next_work(room.members)
    with pytest.raises(StreamError):
        work.run()
    assert work.culprit == 1
    room.rounds.drop(work, [1])
    assert not room.rounds.has(1, 1)
    assert room.rounds.has(0, 1)
    room.push(1, 1)
    assert room.work().seq == 1


def test_clipping_gives_the_norm_first_and_then_uses_the_scale():
    room = Room(rule=Rule("average"), clip=True)
    for worker in (0, 1):
        room.push(worker, 1, hyper=[[]])
    work = room.rounds.next_work(room.members)
    work.run()
    mean = np.float32(0.5) * (gradient(0, 0, 1) + gradient(0, 1, 1))
    assert work.reply is None
    assert work.squares == pytest.approx(float((mean.astype(np.float64) ** 2).sum()), rel=1e-12)
    assert room.rounds.begun == 1
    work.scale = 0.25
    work.run()
    assert room.rounds.finish(work).squares == work.squares
    want = np.float32(0.125) * (gradient(0, 0, 1) + gradient(0, 1, 1))
    assert room.rounds.holding.params.tobytes() == want.tobytes()


def test_work_that_did_not_run_cannot_be_finished():
    room = Room(workers=1)
    room.push(0, 1)
    with pytest.raises(ValueError, match="not run"):
        room.rounds.finish(room.rounds.next_work(room.members))


def test_each_round_has_an_answer_of_its_own():
    room = Room(workers=2)
    for seq, codec in ((1, "dct"), (2, "float32"), (3, "dct")):
        for worker in (0, 1):
            room.push(worker, seq, codec=codec, have=0)
        room.work()
    answers = [room.rounds.answer(0, seq, 0) for seq in (2, 3)]
    assert [[(reply.seq, reply.version) for reply in answer] for answer in answers] == [[(2, 2)], [(3, 3)]]


def test_nothing_is_read_while_the_part_is_worked_on():
    room = Room(workers=1)
    room.push(0, 1, codec="dct")
    room.work()
    assert room.rounds.full().version == 1
    assert room.rounds.full() is room.rounds.full()  # one copy, however many ask
    room.push(0, 2, codec="dct", have=1)
    work = room.rounds.next_work(room.members)
    want = room.rounds.holding.params.tobytes()
    work.run()
    assert room.rounds.version == 1
    full = room.rounds.full()
    assert full is None or full.payload.tobytes() == want
    room.rounds.finish(work)
    assert room.rounds.full().version == 2
    assert room.rounds.full().payload.tobytes() == room.rounds.holding.params.tobytes()


def test_bounded_pushes_are_applied_as_they_come_and_answered_within_the_bound():
    room = Room()
    room.push(0, 1, bound=1)
    assert room.work().version == 1
    assert room.release() == [(0, 1, [1])]
    room.push(0, 2, bound=1)
    room.work()
    assert room.release() == []
    assert room.rounds.is_held(0, 2)
    room.push(1, 1, bound=1)
    room.work()
    assert room.release() == [(0, 2, [3]), (1, 1, [3])]


def test_a_bounded_push_that_is_being_applied_is_not_applied_again():
    room = Room(workers=1)
    room.push(0, 1, bound=5)
    work = room.rounds.next_work(room.members)
    assert room.rounds.has(0, 1)
    room.push(0, 1, bound=5)
    work.run()
    room.rounds.finish(work)
    assert room.work() is None


def test_two_bounded_pushes_may_wait_and_a_gap_is_not_taken():
    room = Room(workers=1)
    for seq in (1, 2, 3):
        room.push(0, seq, bound=0)
    assert [room.rounds.has(0, seq) for seq in (1, 2, 3)] == [True, True, False]
    assert [room.work().seq, room.work().seq, room.work()] == [1, 2, None]
    room.push(0, 3, bound=0)
    assert not room.rounds.has(0, 3)  # two answers are still out
    room.release()
    room.push(0, 4, bound=0)
    room.push(0, 3, bound=0)
    assert [room.rounds.has(0, seq) for seq in (3, 4)] == [True, False]


def test_bounded_pushes_wait_until_all_workers_have_entered():
    room = Room(workers=1)
    room.members = Members(20.0)
    room.enter(0, life=2)
    room.push(0, 1, bound=9, life=2)
    assert room.work() is None
    room.enter(1)
    assert room.work().seq == 1


def test_a_bounded_answer_asked_for_twice_leads_to_the_same_version():
    room = Room()
    room.push(0, 1, bound=9, codec="dct")
    room.work()
    assert room.release() == [(0, 1, [1])]
    for seq in (1, 2):
        room.push(1, seq, bound=9, codec="dct", have=0)
        room.work()
    again = room.rounds.answer(0, 1, 0)
    assert [reply.version for reply in again] == [1]
    room.push(0, 2, bound=9, codec="dct", have=0)
    room.work()
    assert [entry for entry in room.release() if entry[0] == 0] == [(0, 2, [2, 3, 4])]


def test_a_bounded_answer_ends_at_a_whole_part():
    room = Room()
    for seq, codec in ((1, "float32"), (2, "dct")):
        room.push(1, seq, bound=9, codec=codec, have=0)
        room.work()
    room.push(0, 1, bound=9, codec="dct", have=0)
    room.work()
    assert (0, 1, [1]) in room.release()
    room.push(0, 2, bound=9, codec="dct", have=1)
    room.work()
    assert (0, 2, [2, 3, 4]) in room.release()


def test_the_log_is_bounded_by_the_part_and_a_worker_that_fell_behind_gets_all_of_it():
    room = Room()
    room.push(1, 1, bound=9, codec="dct", have=0)
    room.work()
    for seq in range(1, 40):
        room.push(0, seq, bound=9, codec="float16", have=seq)
        room.work()
        room.rounds.release([0])
        assert sum(reply.payload.nbytes for reply in room.rounds._log) <= 4 * PART.size + (1 << 16)
    answer = room.rounds.answer(1, 1, 0)
    assert [(reply.is_full, reply.version) for reply in answer] == [(True, 40)]


def test_empty_replies_are_bounded_too():
    room = Room()
    room.push(1, 1, bound=9, have=0, skip=True)
    room.work()
    for seq in range(1, LOG_LIMIT + 50):
        room.push(0, seq, bound=9, skip=True, have=0)
        room.work()
        room.rounds.release([0])
    assert len(room.rounds._log) == LOG_LIMIT
    assert len(room.rounds._given[0]) <= AHEAD + 1


def test_used_pieces_travel_as_bits():
    assert pack_used(np.ones(9, bool)) == b""
    for count in (1, 7, 8, 9, 100):
        used = np.random.default_rng(count).random(count) < 0.5
        used[0] = False
        assert unpack_used(pack_used(used), count).tolist() == used.tolist()
        assert unpack_used(b"", count).all()


BAD = {
    "codec": [
        "",
        "x" * 129,
        "nosuch",
        "dct:block=7",
        "dct:block=" + "9" * 100,
        "float32:",
        "topk:ratio=1e308",
    ],
    "reply": ["", "x" * 129, "nosuch", "dct:step=nan"],
    "weight": [0.0, -1.0, math.nan, math.inf, 1e31, 5e-324],
    "seq": [0, -1, 3, 2**63],
    "have": [-1],
    "bound": [-2],
    "used": [b"12", b"\0" * 100],
    "hyper": [
        [],
        [[]],
        [[0.5, 0.5, 0.0]],
        [[math.nan, 0.5, 0.0, 0.0]],
        [[0.5, 0.5, 0.0, math.inf]],
        [[1e300, 0.5, 0.0, 0.0]],
        [[0.5, 0.5, 0.0, 0.0], []],
    ],
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field in BAD for value in BAD[field]])
def test_a_bad_push_is_refused_and_changes_nothing(field, value):
    room = Room(workers=1)
    push, payload = push_of(0, 0, 1)
    setattr(push, field, value)
    with pytest.raises((WireError, StreamError, CodecError, UsageError)):
        room.rounds.push(*frames.decode(frames.encode(push, payload)))
    assert room.work() is None
    room.push(0, 1)
    assert room.work().seq == 1


@pytest.mark.parametrize("size", [0, 3, 4 * PART.size - 4, 4 * PART.size + 4])
@pytest.mark.parametrize("skip", [False, True])
def test_a_payload_of_the_wrong_size_is_refused(size, skip):
    room = Room(workers=1)
    push, _ = push_of(0, 0, 1, skip=skip)
    if skip and size == 0:
        assert room.rounds.push(push, memoryview(b"")) is False
        return
    with pytest.raises(StreamError):
        room.rounds.push(push, memoryview(bytes(size)))


def test_hyperparameters_that_the_rule_would_refuse_are_refused_at_the_door():
    adam = Room(workers=1, rule=Rule("adam"))
    for beta in (1.0, -0.1, 2.0):
        with pytest.raises(WireError):
            adam.push(0, 1, hyper=[[0.1, beta, 0.9, 1e-8, 0.0]])
    plain = Room(workers=1, rule=Rule("sgd"))
    with pytest.raises(WireError):
        plain.push(0, 1, hyper=[[0.1, 0.9, 0.0, 0.0]])
    plain.push(0, 1, hyper=[[0.1, 0.0, 0.0, 0.0]])
    assert plain.work().seq == 1


@pytest.mark.parametrize(
    "rule", [Rule("sgd", momentum=True), Rule("adam"), Rule("adamw", amsgrad=True), Rule("average")]
)
@pytest.mark.parametrize("size", [1e18, -1e18, 0.0, 5e-324])
@pytest.mark.parametrize("weight", [1e-30, 1.0, 1e30])
def test_no_hyperparameters_that_are_taken_fail_in_mid_update(rule, size, weight):
    room = Room(workers=1, rule=rule)
    hyper = [[1 - 2**-53 if name.startswith("beta") else size for name in rule.hyper_names]]
    room.push(0, 1, hyper=hyper, weight=weight)
    try:
        room.work()
    except ShoestringError as error:
        pytest.fail(f"{error}")
