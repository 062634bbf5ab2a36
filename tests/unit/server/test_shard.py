"""One shard's side of the protocol, message by message."""

import math

import msgspec
import numpy as np
import pytest

from shoestring.errors import NonFiniteError, SnapshotError, StaleWorkerError, StreamError
from shoestring.model.rules import Rule
from shoestring.model.table import Table
from shoestring.server.shard import ROUND_LIMIT, TEXT_LIMIT
from shoestring.wire import frames
from shoestring.wire import messages as say
from tests.unit.server.talk import PARTS, Talk, kinds, push_of, refusal, table


def welcome(incarnation: int, seq: int) -> say.Welcome:
    return say.Welcome(protocol=say.PROTOCOL, incarnation=incarnation, round=seq, lease_s=20.0)


def test_the_life_of_two_workers():
    talk = Talk()
    assert talk.hello(0) == [("0.1", welcome(1, 0))]
    assert talk.tell(0, say.Enter(1)) == [("0.1", say.Entered(1, 1, True))]
    talk.enter(1)
    assert talk.tell(1, say.Pull(0, 0)) == []
    assert talk.tell(0, say.Pull(0, 0)) == [("0.1", say.Missing(0, 0))]
    values = np.arange(PARTS[0].size, dtype=np.float32)
    said = talk.tell(0, say.Init(0), values.view(np.uint8).data)
    assert sorted(said) == [(who, say.Full(part=0, version=0, seq=0)) for who in ("0.1", "1.1")]
    assert talk.payloads == [values.tobytes()] * 2
    talk.tell(0, say.Init(1), np.zeros(PARTS[1].size, np.float32).view(np.uint8).data)
    decisions = say.Decisions(delay=say.Delay(4, 1))
    said = talk.round(1, decisions=decisions)
    full = say.Full(part=0, version=1, seq=1, decisions=decisions)
    assert [message for _, message in said] == [
        msgspec.structs.replace(full, part=part) for part in (0, 0, 1, 1)
    ]
    assert [who for who, _ in said] == ["0.1", "1.1"] * 2
    for _ in range(2):  # the first answer may be lost
        assert talk.tell(0, say.Leave()) == [("0.1", say.Left())]
    assert talk.shard.departed == [0]
    assert refusal(talk.tell(0, say.Beat(1.0))).stale
    talk.push(0, 1, 2)
    assert kinds(talk.work()) == ["1.1 Full"]


def test_a_second_init_changes_nothing():
    talk = Talk().begin()
    ones = np.ones(PARTS[0].size, np.float32).view(np.uint8).data
    assert talk.tell(1, say.Init(0), ones) == []
    assert not np.frombuffer(talk.params()[0], np.float32).any()
    assert "bytes" in refusal(talk.tell(1, say.Init(0), ones[:-4])).message


def test_no_work_before_parameters_are_there():
    talk = Talk()
    for worker in (0, 1):
        talk.enter(worker)
    assert talk.round(1) == []
    for part in PARTS:
        talk.tell(0, say.Init(part.index), np.zeros(part.size, np.float32).view(np.uint8).data)
    assert len(talk.work()) == 4


def test_a_pull_waits_for_its_round_and_for_work_under_way():
    talk = Talk(1).begin()
    assert talk.tell(0, say.Pull(0, 1)) == []
    talk.push(0, 0, 1, codec="dct")
    work = talk.shard.next_work()
    assert talk.tell(0, say.Pull(0, 1)) == []
    work.run()
    talk.shard.finish(work)
    assert kinds(talk.heard()) == ["0.1 Delta", "0.1 Full"]
    assert len(talk.shard._readers.waiting) == 0


def test_asking():
    talk = Talk().begin()
    assert talk.tell(0, say.Ask(0, 1, 0)) == [("0.1", say.Missing(0, 1))]
    talk.push(0, 0, 1)
    assert talk.tell(0, say.Ask(0, 1, 0)) == []  # it waits for the other
    talk.push(0, 1, 1)
    work = talk.shard.next_work()
    assert talk.tell(0, say.Ask(0, 1, 0)) == []
    work.run()
    talk.shard.finish(work)
    first = talk.heard()
    assert talk.tell(0, say.Ask(0, 1, 0)) == first[:1]
    assert talk.push(0, 0, 1) == first[:1]


def test_an_ask_that_takes_the_whole_part_waits_for_work_under_way():
    talk = Talk(1).begin()
    for seq in (1, 2, 3):
        talk.push(0, 0, seq, codec="dct")
        talk.work()
    talk.push(0, 0, 4, codec="dct")
    work = talk.shard.next_work()
    work.run()
    assert talk.tell(0, say.Ask(0, 1, 0)) == []
    talk.shard.finish(work)
    assert [(kind, m.version) for (_, m), kind in ((s, type(s[1]).__name__) for s in talk.heard())] == [
        ("Delta", 4),
        ("Full", 4),
    ]
    assert talk.payloads[1] == talk.params()[0]


def test_bounded_answers_are_chains_that_say_where_they_end():
    talk = Talk().begin()
    for seq in (1, 2):
        talk.push(0, 1, seq, codec="dct", bound=9, have=0)
        talk.work()
    talk.push(0, 0, 1, codec="dct", bound=9, have=0)
    said = [(m.version, m.seq, m.last) for who, m in talk.work() if who == "0.1"]
    assert said == [(1, 1, False), (2, 1, False), (3, 1, True)]
    assert [m.last for _, m in talk.tell(0, say.Ask(0, 1, 0))] == [False, False, True]
    assert talk.tell(0, say.Ask(0, 1, 7)) == [
        ("0.1", say.Delta(part=0, version=0, seq=1, codec="", last=True))
    ]


def test_a_repeated_push_does_not_get_round_the_bound():
    talk = Talk().begin()
    talk.push(0, 0, 1, bound=0)
    assert talk.work() == []
    assert talk.push(0, 0, 1, bound=0) == []
    assert talk.tell(0, say.Ask(0, 1, 0)) == []
    talk.push(0, 1, 1, bound=0)
    assert sorted(kinds(talk.work())) == ["0.1 Full", "1.1 Full"]


def test_a_bounded_worker_comes_back_where_the_slowest_is():
    talk = Talk().begin()
    for seq in range(1, 6):
        for part in (0, 1):
            for worker in (0, 1):
                talk.push(part, worker, seq, bound=2)
        talk.work()
    assert talk.hello(1, 2) == [("1.2", welcome(2, 5))]
    assert talk.tell(1, say.Enter(6), life=2) == [("1.2", say.Entered(6, 6, True))]
    assert kinds(talk.tell(1, say.Pull(0, 5), life=2)) == ["1.2 Full"]
    talk.push(0, 0, 6, bound=2)
    assert kinds(talk.work()) == ["0.1 Full"]


def test_clipping():
    talk = Talk(model=table(1.0)).begin()
    assert kinds(talk.round(1)) == ["0.1 Norm", "1.1 Norm"] * 2
    assert kinds(talk.tell(0, say.Ask(1, 1, 0))) == ["0.1 Norm"]  # it may have been lost
    assert talk.tell(0, say.Scale(2, 0.5)) == []  # of no round that waits
    assert talk.tell(0, say.Scale(1, 0.5)) == []
    assert talk.tell(1, say.Scale(1, 0.25)) == []  # the first counts
    said = talk.work()
    assert kinds(said) == ["0.1 Full", "1.1 Full"] * 2
    assert all(message.squares > 0 for _, message in said)
    assert talk.tell(1, say.Scale(1, 0.25)) == []
    clipped, plain = talk.params(), Talk().begin()
    plain.round(1)
    np.testing.assert_allclose(
        np.frombuffer(clipped[0], np.float32), 0.5 * np.frombuffer(plain.params()[0], np.float32), rtol=1e-6
    )


@pytest.mark.parametrize("scale", [math.nan, math.inf, -0.5, 1.5])
def test_a_scale_out_of_range_is_refused(scale):
    talk = Talk(model=table(1.0)).begin()
    talk.round(1)
    assert "a scale of" in refusal(talk.tell(0, say.Scale(1, scale))).message


def test_a_part_that_is_skipped_needs_no_scale():
    talk = Talk(1, model=table(1.0)).begin()
    talk.push(0, 0, 1, skip=True)
    talk.push(1, 0, 1)
    assert kinds(talk.work()) == ["0.1 Delta", "0.1 Norm"]


def test_a_clipped_round_goes_on_when_one_dies_and_is_given_up_when_all_do():
    talk = Talk(model=table(1.0)).begin()
    talk.round(1)
    talk.tell(0, say.Leave())
    talk.tell(1, say.Scale(1, 0.5))
    assert kinds(talk.work()) == ["1.1 Full"] * 2
    for part in (0, 1):
        talk.push(part, 1, 2)
    talk.work()
    before = talk.params()
    talk.hello(1, 2)  # its process died with the norm
    assert talk.tell(1, say.Enter(3), life=2) == [("1.2", say.Entered(3, 3, True))]
    assert talk.tell(1, say.Pull(0, 2), life=2) == []
    assert kinds(talk.work()) == ["1.2 Full"]
    assert talk.params() == before
    talk.push(0, 1, 3, life=2)
    assert kinds(talk.work()) == ["1.2 Norm"]


def test_answers_go_to_the_life_that_pushed():
    talk = Talk().begin()
    talk.push(0, 0, 1)
    talk.push(0, 1, 1)
    work = talk.shard.next_work()
    talk.enter(0, 2, life=2)
    work.run()
    talk.shard.finish(work)
    assert kinds(talk.heard()) == ["1.1 Full"]


def test_a_worker_that_is_replaced_is_waited_for_no_more():
    talk = Talk().begin()
    talk.push(0, 1, 1)
    assert talk.work() == []
    talk.hello(0, 2)
    assert kinds(talk.work()) == ["1.1 Full"]
    assert refusal(talk.push(0, 0, 1)).stale


def test_a_lease_that_runs_out_in_the_middle_of_a_round():
    talk = Talk().begin()
    talk.push(0, 1, 1)
    talk.now = 15.0
    talk.tell(1, say.Beat(0.0))
    assert talk.shard.tick(21.0) == [0]
    assert kinds(talk.work()) == ["1.1 Full"]
    assert refusal(talk.push(0, 0, 1)).stale


def test_entering():
    talk = Talk(1).begin()
    for seq in (1, 2, 3):
        talk.round(seq)
    assert talk.hello(0, 2)[0][1].round == 3
    refused = [talk.tell(0, say.Enter(3), life=2)[0][1] for _ in range(4)]
    assert refused == [say.Entered(3, first, False) for first in (5, 6, 8, 12)]  # ever more room
    for _ in range(2):  # said twice, it is agreed twice
        assert talk.tell(0, say.Enter(12), life=2)[0][1] == say.Entered(12, 12, True)
    assert talk.tell(0, say.Pull(0, 11), life=2) == []
    assert kinds(talk.work()) == ["0.2 Full"]
    for first in (3, -1, 0):  # earlier questions, which came late
        assert talk.tell(0, say.Enter(first), life=2) == []
    for first in (ROUND_LIMIT + 1, 2**64 - 1):
        answer = talk.tell(0, say.Enter(first), life=2)[0][1]
        assert not answer.agreed
        assert answer.round < 2**62


def test_a_round_that_has_begun_cannot_be_entered():
    talk = Talk(1).begin()
    talk.push(0, 0, 1)
    work = talk.shard.next_work()
    talk.hello(0, 2)
    assert talk.tell(0, say.Enter(1), life=2)[0][1] == say.Entered(1, 3, False)
    work.run()
    talk.shard.finish(work)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"protocol": 99}, "protocol 99"),
        ({"run": "other"}, "run `other`"),
        ({"shard": 1}, "shard 1 of 1"),
        ({"shards": 3}, "shard 0 of 3"),
        ({"workers": 3}, "worker 0 of 3"),
        ({"worker": 2}, "worker 2 of 2"),
        ({"life": "older", "incarnation": 0}, "later process"),
        ({"run": "x" * 500_000}, "xxx"),
    ],
)
def test_a_hello_that_does_not_fit(changed, words):
    talk = Talk().begin()
    before = talk.params()
    answer = refusal(talk.hello(0, **changed))
    assert words in answer.message
    assert len(answer.message) <= TEXT_LIMIT
    frames.decode(frames.encode(answer))
    assert talk.params() == before
    assert len(talk.round(1)) == 4


def test_another_model_is_refused_by_its_first_difference():
    talk = Talk().begin()
    talk.packed = memoryview(msgspec.msgpack.encode(table(shapes=((30_000,), (200, 161), (5,)))))
    assert "`t1` has shape (200, 161), others have (200, 160)" in refusal(talk.hello(1, 2)).message


@pytest.mark.parametrize(
    "packed",
    [
        b"",
        b"\xc1",
        b"\x91" * 50_000,
        msgspec.msgpack.encode([[], {"kind": "nosuch"}, 1, 0.0]),
        msgspec.msgpack.encode([[], {"kind": "adam", "momentum": True}, 1, 0.0]),
        msgspec.msgpack.encode([[], {"kind": "sgd", "nesterov": True}, 1, 0.0]),
        msgspec.msgpack.encode([[["t", [-5], 0]], {"kind": "sgd"}, 1, 0.0]),
        msgspec.msgpack.encode([[["t", [2**60], 0]], {"kind": "sgd"}, 1, 0.0]),
        msgspec.msgpack.encode([[["t", [2**36] * 16, 0]], {"kind": "sgd"}, 1, 0.0]),
        msgspec.msgpack.encode([[["t", [5], 7]], {"kind": "sgd"}, 1, 0.0]),
        msgspec.msgpack.encode([[["t", [5], 0]], {"kind": "sgd"}, 2**63, 0.0]),
        msgspec.msgpack.encode([[["t", [5], 0]], {"kind": "sgd"}, 1, math.nan]),
    ],
)
def test_a_first_table_that_is_none_leaves_the_shard_open_to_others(packed):
    talk = Talk(1)
    good, talk.packed = talk.packed, memoryview(packed)
    refusal(talk.hello(0))
    talk.packed = good
    talk.begin()
    assert len(talk.round(1)) == 2


def test_a_model_without_tensors_and_a_shard_without_parts():
    talk = Talk(1, model=Table((), Rule("sgd"), 0, 0.0))
    assert talk.hello(0) == [("0.1", welcome(1, 0))]
    assert talk.tell(0, say.Enter(10**12)) == [("0.1", say.Entered(10**12, 10**12, True))]
    assert talk.work() == []
    assert "part 0 is not on shard 0" in refusal(talk.tell(0, say.Pull(0, 0))).message
    assert talk.tell(0, say.Scale(5, 0.5)) == []


def test_a_restore_that_fails_refuses_the_worker_and_can_be_tried_again():
    def restore(holding):
        raise SnapshotError("damaged", hint="another")

    talk = Talk(1, restore=restore)
    assert refusal(talk.hello(0)).message == "damaged"
    talk.shard.restore = lambda holding: None
    assert len(talk.begin().round(1)) == 2


def test_an_update_that_fails_for_nobodys_bytes_is_told_to_all_and_to_those_who_come_later():
    talk = Talk().begin()
    huge = np.full(PARTS[0].size, 3e38, np.float32).view(np.uint8).data
    for worker in (0, 1):
        push, _ = push_of(0, worker, 1, reply="dct", hyper=[[1e9, 0.0, 0.0, 0.0]])
        push.weight = 0.25
        talk.tell(worker, push, huge)
    work = talk.shard.next_work()
    with pytest.raises(NonFiniteError, match="overflowed") as caught:
        work.run()
    talk.shard.fail(work, caught.value)
    said = talk.heard()
    assert kinds(said) == ["0.1 Refusal", "1.1 Refusal"]
    assert "clip" in said[0][1].hint
    assert "overflowed" in refusal(talk.hello(0, 2)).message


def test_bytes_of_one_worker_cost_that_worker_alone():
    talk = Talk().begin()
    talk.push(0, 0, 1)
    push, payload = push_of(0, 1, 1, codec="dct")
    talk.tell(1, push, memoryview(bytes(payload)[:-1]))
    work = talk.shard.next_work()
    with pytest.raises(StreamError) as caught:
        work.run()
    talk.shard.fail(work, caught.value)
    assert kinds(talk.heard()) == ["1.1 Refusal"]
    assert kinds(talk.work()) == ["0.1 Full"]


def test_workers_with_different_policies_are_told_so():
    talk = Talk(model=msgspec.structs.replace(table(), policy="every:delay=0,warmup=0")).begin()
    other = msgspec.structs.replace(table(), policy="bounded:staleness=4,warmup=0")
    talk.packed = memoryview(msgspec.msgpack.encode(other))
    words = "its policy is `bounded:staleness=4,warmup=0`, others have `every:delay=0,warmup=0`"
    assert words in refusal(talk.hello(1, 2)).message


def test_a_refusal_of_any_stale_worker_says_so():
    class LaterError(StaleWorkerError):
        pass

    talk = Talk().begin()
    talk.shard.refuse(b"0.1", LaterError("why", hint="how"))
    assert talk.heard() == [("0.1", say.Refusal("why", "how", stale=True))]


def test_a_push_in_another_workers_name_is_refused():
    talk = Talk().begin()
    for changed in ({"worker": 1}, {"sender": 1}, {"worker": 1, "sender": 1}):
        message, payload = push_of(0, 0, 1)
        message = msgspec.structs.replace(message, **changed)
        assert "counts for" in refusal(talk.tell(0, message, payload)).message


def test_decisions_that_do_not_fit_the_run_are_refused():
    talk = Talk().begin()
    for decisions in (say.Decisions(paces=(1.0, 2.0)), say.Decisions(shares=say.Shares(3, (1, 2, 3)))):
        assert "decisions that do not fit" in refusal(talk.push(0, 0, 1, decisions=decisions)).message
