"""One worker's side of the protocol, message by message. The simulation in tests/model does the rest."""

import msgspec
import pytest

from shoestring.errors import JoinError, LinkError, ShoestringError, StaleWorkerError, UsageError
from shoestring.wire import messages as say
from shoestring.worker.protocol.joining import Identity, Stage
from shoestring.worker.protocol.worker import Worker
from tests.unit.server.talk import EMPTY, PARTS, push_of, record, table

TABLE = memoryview(msgspec.msgpack.encode(table()))
WHO = Identity("run", 0, 2, "life", 3)
VALUES = [memoryview(bytes(4 * part.size)) for part in PARTS]


TIMES = {"timeout_s": 60.0, "join_timeout_s": 600.0, "ask_after_s": 5.0}


def make(*, shards: int = 1, homes=(0, 0), worker: int = 0, clip_norm: float = 0.0, **settings) -> Worker:
    return Worker(
        Identity("run", worker, 2, "life", 3),
        TABLE,
        homes,
        [part.size for part in PARTS],
        [f"tcp://shard-{index}" for index in range(shards)],
        initial=lambda part: VALUES[part],
        clip_norm=clip_norm,
        now=0.0,
        **(TIMES | settings),
    )


def said(worker: Worker) -> list:
    """What the worker has to say, but for beats."""
    out = [(shard, message) for shard, message, _ in worker.outbox if not isinstance(message, say.Beat)]
    worker.outbox.clear()
    return out


def welcome(worker: Worker, shard: int = 0, round: int = 0, now: float = 0.0) -> None:
    message = say.Welcome(protocol=say.PROTOCOL, incarnation=7 + shard, round=round, lease_s=20.0)
    worker.handle(shard, message, EMPTY, now)


def full(part: int, seq: int = 0, version: int = 0) -> say.Full:
    return say.Full(part=part, version=version, seq=seq)


def joined(**settings) -> Worker:
    worker = make(**settings)
    for shard in range(len(worker.joining.incarnations)):
        welcome(worker, shard)
    for shard in range(len(worker.joining.incarnations)):
        worker.handle(shard, say.Entered(1, 1, True), EMPTY, 0.0)
    for part in (0, 1):
        worker.handle(0, full(part), VALUES[part], 0.0)
    while worker.heard:
        worker.answers.add(worker.heard.popleft())
    assert worker.answers.apply(0, lambda answer: None)
    said(worker)
    return worker


def test_joining_two_shards_one_of_which_has_gone_on():
    worker = make(shards=2, homes=(0, 1))
    hellos = said(worker)
    assert [(shard, type(message)) for shard, message in hellos] == [(0, say.Hello), (1, say.Hello)]
    assert (hellos[1][1].shard, hellos[1][1].shards, hellos[1][1].incarnation) == (1, 2, 3)
    welcome(worker, 0, round=4)
    assert said(worker) == []
    welcome(worker, 1, round=2)
    assert said(worker) == [(0, say.Enter(5)), (1, say.Enter(5))]
    worker.handle(0, say.Entered(5, 9, False), EMPTY, 0.0)
    worker.handle(1, say.Entered(5, 5, True), EMPTY, 0.0)
    assert said(worker) == [(0, say.Enter(9)), (1, say.Enter(9))]
    worker.handle(0, say.Entered(5, 7, False), EMPTY, 0.0)  # late: of the question before
    for shard in (0, 1):
        worker.handle(shard, say.Entered(9, 9, True), EMPTY, 0.0)
    assert said(worker) == [(0, say.Pull(0, 8)), (1, say.Pull(1, 8))]
    worker.handle(1, say.Missing(1, 0), EMPTY, 0.0)
    assert said(worker) == [(1, say.Init(1)), (1, say.Pull(1, 8))]
    worker.handle(0, full(0, version=3), VALUES[0], 0.0)
    worker.handle(0, full(0, version=4), VALUES[0], 0.0)  # again
    assert not worker.has_joined
    worker.handle(1, full(1), VALUES[1], 0.0)
    assert worker.has_joined
    assert [(answer.part, answer.message.version) for answer in worker.heard] == [(0, 3), (1, 0)]


def test_every_question_of_joining_is_asked_again_until_it_is_answered():
    worker = make()
    [hello] = said(worker)
    worker.tick(5.1)
    assert said(worker) == [hello]
    welcome(worker, now=6.0)
    [enter] = said(worker)
    worker.tick(11.1)
    assert said(worker) == [enter]
    worker.handle(0, say.Entered(1, 1, True), EMPTY, 12.0)
    pulls = said(worker)
    worker.tick(18.0)
    assert said(worker) == []  # the answers may be on their way
    worker.handle(0, say.Beat(18.0), EMPTY, 18.5)  # and are not, or they had come before
    worker.tick(19.0)
    assert said(worker) == pulls


def test_a_shard_that_never_answers_is_named_and_the_user_told_before():
    worker = make(timeout_s=60.0)
    worker.tick(5.5)
    assert list(worker.notices) == ["waiting for shard 0 (tcp://shard-0), up to 60 s"]
    worker.tick(59.0)
    with pytest.raises(LinkError, match="shard 0 at `tcp://shard-0` did not answer for 60 s"):
        worker.tick(61.0)


def test_workers_that_never_come_end_the_wait_for_parameters():
    worker = make(join_timeout_s=100.0)
    welcome(worker)
    worker.handle(0, say.Entered(1, 1, True), EMPTY, 0.0)
    for now in range(1, 100):
        worker.handle(0, say.Beat(float(now)), EMPTY, float(now))
        worker.tick(float(now))
    assert list(worker.notices) == ["waiting for other workers at shard 0 (tcp://shard-0), up to 100 s"]
    worker.handle(0, say.Beat(200.0), EMPTY, 200.0)
    with pytest.raises(JoinError, match="no parameters to give for 100 s"):
        worker.tick(200.0)


def test_a_model_without_parts_is_refused():
    with pytest.raises(UsageError, match="no trainable"):
        Worker(WHO, TABLE, [], [], ["a"], initial=lambda part: EMPTY, now=0.0, **TIMES)


@pytest.mark.parametrize(("is_stale", "kind"), [(True, StaleWorkerError), (False, JoinError)])
def test_a_refusal_while_joining(is_stale, kind):
    with pytest.raises(kind, match="shard 0 refused: why") as caught:
        make().handle(0, say.Refusal("why", "how", is_stale), EMPTY, 0.0)
    assert caught.value.hint == "how"


def test_a_refusal_in_training_ends_it_and_one_after_leaving_does_not():
    worker = joined()
    with pytest.raises(ShoestringError, match="refused: why"):
        worker.handle(0, say.Refusal("why", "how"), EMPTY, 1.0)
    worker.leave(2.0)
    worker.handle(0, say.Refusal("not here", "how", True), EMPTY, 2.0)
    assert worker.has_left


def test_a_push_says_whom_it_counts_for_and_who_sends_it():
    worker = joined(worker=1)
    message, payload = push_of(0, 0, 1, have=9)
    worker.push(message, payload, 1.0)
    assert (message.worker, message.sender, message.incarnation, message.have) == (1, 1, 7, 0)
    assert list(worker.outbox) == [(0, message, payload)]


def test_a_push_is_asked_about_and_sent_again_if_it_is_missing():
    worker = joined()
    message, payload = push_of(0, 0, 1)
    worker.push(message, payload, 1.0)
    said(worker)
    worker.tick(6.1)
    assert said(worker) == [(0, say.Ask(0, 1, 0))]
    worker.handle(0, say.Missing(0, 1), EMPTY, 6.2)
    assert list(worker.outbox)[-1] == (0, message, payload)
    worker.handle(0, full(0, 1, 1), VALUES[0], 6.3)
    worker.handle(0, full(0, 1, 1), VALUES[0], 6.4)  # the answer to the question
    assert len(worker.heard) == 1
    said(worker)
    worker.tick(30.0)
    assert said(worker) == []


def test_an_answer_is_not_taken_before_the_one_that_it_follows():
    worker = joined()
    for seq in (1, 2):
        worker.push(*push_of(0, 0, seq), 1.0)

    def delta(version: int, seq: int) -> say.Delta:
        return say.Delta(part=0, version=version, seq=seq, codec="dct", last=True)

    worker.handle(0, delta(2, 2), EMPTY, 2.0)
    assert list(worker.heard) == []
    worker.handle(0, delta(1, 1), EMPTY, 2.0)
    worker.handle(0, delta(2, 2), EMPTY, 2.0)
    assert [answer.message.seq for answer in worker.heard] == [1, 2]


def test_answers_of_later_rounds_do_not_stand_in_for_earlier_ones():
    """A bounded worker has two rounds under way; the first answer is lost, the second brings more."""
    worker = joined()
    for seq in (1, 2):
        worker.push(*push_of(0, 0, seq), 1.0)
    for version in (1, 2, 3):
        answer = say.Delta(part=0, version=version, seq=2, codec="dct", last=version == 3)
        worker.handle(0, answer, EMPTY, 2.0)
    worker.handle(0, say.Delta(part=0, version=3, seq=1, codec="dct", last=True), EMPTY, 2.0)
    assert [answer.message.seq for answer in worker.heard] == [2, 2, 2]


def test_the_scale_is_told_to_all_and_again_to_the_shard_that_asks():
    worker = joined(shards=2, homes=(0, 1), clip_norm=1.0)
    worker.handle(0, say.Norm(0, 1, 9.0), EMPTY, 1.0)
    assert said(worker) == []
    worker.handle(1, say.Norm(1, 1, 16.0), EMPTY, 1.0)
    scale = say.Scale(1, 1.0 / (5.0 + 1e-6))
    assert said(worker) == [(0, scale), (1, scale)]
    worker.handle(1, say.Norm(1, 1, 16.0), EMPTY, 2.0)
    assert said(worker) == [(1, scale)]


def test_records_and_reports_of_checkpoints_are_asked_for_until_they_came():
    worker = joined(shards=2, homes=(0, 1))
    worker.record(4, bytes(record(0)), 1.0)
    worker.expect_reports(4, 1.0)
    assert said(worker) == [(0, say.Saved(4))]
    worker.tick(6.1)
    assert said(worker) == [(0, say.Saved(4)), (0, say.AskSnapped(4)), (1, say.AskSnapped(4))]
    worker.handle(0, say.Recorded(4), EMPTY, 7.0)
    for _ in range(2):
        worker.handle(1, say.Snapped(4), memoryview(b"[]"), 7.0)
    assert list(worker.reports) == [(say.Snapped(4), b"[]")]
    worker.tick(30.0)
    assert said(worker) == [(0, say.AskSnapped(4))]
    for seq in range(5, 50):
        worker.expect_reports(seq, 40.0)
    worker.tick(60.0)
    assert len(said(worker)) == 2 * 4  # of the last four


def test_leaving_is_said_until_every_shard_knows():
    worker = joined(shards=2, homes=(0, 1))
    worker.leave(1.0)
    worker.leave(1.5)
    assert said(worker) == [(0, say.Leave()), (1, say.Leave())]
    worker.handle(1, say.Left(), EMPTY, 1.6)
    worker.tick(2.5)
    assert said(worker) == [(0, say.Leave())]
    assert not worker.has_left
    worker.handle(0, say.Left(), EMPTY, 2.6)
    assert worker.has_left


def test_shards_without_parts_are_told_who_comes_and_never_waited_for():
    worker = make(shards=3, homes=(0, 0), clip_norm=1.0)
    assert [(shard, type(message)) for shard, message in said(worker)] == [
        (shard, say.Hello) for shard in range(3)
    ]
    welcome(worker, 0)
    assert said(worker) == [(0, say.Enter(1))]
    worker.handle(0, say.Entered(1, 1, True), EMPTY, 0.0)
    for part in (0, 1):
        worker.handle(0, full(part), VALUES[part], 0.0)
    assert worker.has_joined
    said(worker)
    worker.tick(6.0)
    assert [(shard, type(message)) for shard, message in said(worker)] == [(1, say.Hello), (2, say.Hello)]
    welcome(worker, 1, now=7.0)
    assert said(worker) == [(1, say.Enter(1))]
    worker.tick(13.0)
    assert said(worker)[0] == (1, say.Enter(1))
    worker.handle(1, say.Entered(1, 1, True), EMPTY, 13.1)
    worker.handle(0, say.Norm(0, 1, 9.0), EMPTY, 14.0)
    worker.handle(0, say.Norm(1, 1, 16.0), EMPTY, 14.0)
    assert {shard for shard, _ in said(worker)} == {0}
    worker.handle(0, say.Beat(60.0), EMPTY, 60.0)
    worker.tick(100.0)  # the others are silent, and nobody minds
    assert {shard for shard, message, _ in worker.outbox if isinstance(message, say.Beat)} == {0, 1}
    said(worker)
    worker.leave(101.0)
    assert said(worker) == [(shard, say.Leave()) for shard in range(3)]
    for shard in (0, 1):
        assert not worker.has_left
        worker.handle(shard, say.Left(), EMPTY, 101.1)
    assert worker.has_left


def test_a_worker_that_was_never_let_in_leaves_at_once():
    worker = make()
    worker.leave(1.0)
    assert worker.has_left
    assert worker.joining.stage is Stage.HELLO


def test_a_slow_link_has_time_for_what_is_on_it():
    worker = joined(timeout_s=60.0)
    message, _ = push_of(0, 0, 1)
    worker.push(message, memoryview(bytes(6_250_000)), 0.0)  # a hundred seconds at 1 Mbit/s there and back
    worker.tick(150.0)
    with pytest.raises(LinkError, match="did not answer"):
        worker.tick(161.0)


def test_a_commit_goes_with_the_last_push_and_to_the_other_shards():
    worker = joined(shards=2, homes=(0, 1))
    worker.push(*push_of(1, 0, 1, early=True), 1.0)
    message, payload = push_of(0, 0, 1, early=True, commit=say.Commit(1, True))
    worker.push(message, payload, 1.0, lambda part: (("params",), VALUES[part]))
    assert [(shard, type(sent)) for shard, sent in said(worker)] == [
        (1, say.Push),
        (0, say.Push),
        (1, say.Commit),
    ]
    worker.handle(1, say.Wanted(1, 1), EMPTY, 1.5)
    assert list(worker.outbox)[-1] == (1, say.Put(1, 1, ("params",)), VALUES[1])
    worker.handle(1, say.Wanted(1, 2), EMPTY, 1.5)
    assert said(worker) == [(1, say.Put(1, 1, ("params",)))]
    worker.tick(6.1)
    assert said(worker)[:2] == [(1, say.Commit(1, True)), (1, say.Ask(1, 1, 0))]


def test_the_state_is_asked_for_part_by_part_until_all_of_it_came():
    worker = joined(shards=2, homes=(0, 1))
    worker.ask_state(3, 1.0)
    asked = [(0, say.AskState(0, 3)), (1, say.AskState(1, 3))]
    assert said(worker) == asked
    worker.handle(0, say.State(0, 2, ()), EMPTY, 1.5)  # an earlier question's
    worker.handle(1, say.State(1, 3, ("steps",)), VALUES[1], 1.5)
    worker.handle(1, say.State(1, 3, ("steps",)), VALUES[1], 1.5)
    assert not worker.has_state
    worker.tick(7.0)
    assert said(worker) == []  # the answer may be on its way
    worker.handle(0, say.Beat(6.5), EMPTY, 7.5)
    worker.tick(8.0)
    assert said(worker) == asked[:1]
    worker.handle(0, say.State(0, 3, ("steps",)), VALUES[0], 8.5)
    assert worker.has_state
    assert {part: message.round for part, (message, _) in worker.states.items()} == {0: 3, 1: 3}


def test_a_commit_goes_to_the_shards_that_hold_parts_and_again_with_every_question():
    worker = joined(shards=3, homes=(0, 2))
    for part in (0, 1):
        worker.push(*push_of(part, 0, 1, early=True), 1.0)
    said(worker)
    worker.commit(say.Commit(1))
    assert said(worker) == [(0, say.Commit(1)), (2, say.Commit(1))]
    worker.handle(0, full(0, 1, 1), VALUES[0], 1.0)
    worker.tick(6.1)
    assert said(worker) == [(2, say.Commit(1)), (2, say.Ask(1, 1, 0))]
    worker.handle(2, full(1, 1, 1), VALUES[1], 6.2)
    assert worker._commits == {}
    worker.tick(30.0)
    assert said(worker) == []
