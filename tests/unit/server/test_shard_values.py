"""What workers put on a shard besides gradients, and what they ask it for besides parameters."""

import numpy as np
import pytest

from shoestring.errors import UsageError
from shoestring.model.parts import pack_flags
from shoestring.model.vectors import checksums_of, pack, unpack
from shoestring.wire import messages as say
from tests.unit.server.talk import EMPTY, PARTS, SGD, Talk, kinds, refusal, table

NAMES = ("steps", "momentum")


def commit(talk: Talk, worker: int, seq: int = 1, *, changed=(), **more) -> list:
    flags = np.array([part.index in changed for part in PARTS])
    return talk.tell(worker, say.Commit(seq, changed=pack_flags(flags), **more))


def vectors(part: int, seed: int = 0, **changed) -> dict[str, np.ndarray]:
    rng = np.random.default_rng((part, seed))
    drawn = {
        "params": rng.standard_normal(PARTS[part].size).astype(np.float32),
        "steps": np.full(len(PARTS[part].pieces), 7),
        "momentum": rng.standard_normal(PARTS[part].size).astype(np.float32),
    }
    return drawn | changed


def put_of(part: int, seq: int, names, seed: int = 0):
    values = vectors(part, seed)
    return say.Put(part, seq, tuple(names)), pack({name: values[name] for name in names})


def state_of(talk: Talk, part: int, worker: int = 0, round: int = 0) -> dict[str, np.ndarray]:
    said = talk.tell(worker, say.AskState(part, round))
    assert [message for _, message in said] == [say.State(part, round, NAMES)]
    return unpack(NAMES, memoryview(talk.payloads[0]), PARTS[part], SGD)


def test_the_first_worker_brings_the_optimizers_state_with_the_parameters():
    talk = Talk()
    for worker in (0, 1):
        talk.enter(worker)
    for part in (0, 1):
        values = vectors(part)
        talk.tell(0, say.Init(part, ("params", *NAMES)), pack(values))
        talk.tell(1, say.Init(part), pack({"params": vectors(part, seed=1)["params"]}))  # too late
        holding = talk.shard.parts[part].holding
        assert holding.params.tobytes() == values["params"].tobytes()
        assert holding.steps.tolist() == values["steps"].tolist()
        assert state_of(talk, part)["momentum"].tobytes() == values["momentum"].tobytes()


def test_state_is_that_of_the_round_asked_for_while_the_next_one_is_summed():
    talk = Talk().begin()
    assert talk.tell(0, say.AskState(0, 1)) == []  # not there yet
    assert kinds(talk.round(1))[-1] == "1.1 Full"
    assert kinds(talk.tell(1, say.AskState(0, 1))) == ["1.1 State"]
    before = state_of(talk, 0, round=1)
    assert before["steps"].tolist() == [1] * len(PARTS[0].pieces)
    talk.round(2, early=True)
    assert state_of(talk, 0, round=1)["momentum"].tobytes() == before["momentum"].tobytes()
    for worker in (0, 1):
        commit(talk, worker, 2)
    work = talk.shard.next_work()
    assert talk.tell(0, say.AskState(0, 1)) == []  # it is being changed
    work.run()
    talk.shard.finish(work)
    assert "0.1 State" in kinds(talk.heard())
    assert state_of(talk, 0)["steps"].tolist() == [2] * len(PARTS[0].pieces)


def test_a_question_that_was_answered_while_waiting_is_answered_once():
    talk = Talk().begin()
    for _ in range(3):
        talk.tell(0, say.AskState(0, 1))
    assert kinds(talk.round(1)).count("0.1 State") == 1
    assert len(talk.shard._readers.waiting) == 0


def test_many_questions_cost_one_copy():
    talk = Talk().begin()
    for _ in range(300):
        talk.shard.handle(b"0.1", say.AskState(0, 0), EMPTY, 0.0)
    assert len({id(payload.obj) for _, _, payload in talk.shard.outbox}) == 1


def test_what_all_workers_have_set_is_asked_of_the_first_and_put_before_the_update():
    talk = Talk().begin()
    talk.round(1, codec="dct")
    talk.round(2, early=True, codec="dct")
    commit(talk, 1, 2, changed=[0], loads=True)
    assert commit(talk, 0, 2, changed=[0], loads=True) == [
        ("0.1", say.Wanted(0, 2)),
        ("0.1", say.Wanted(1, 2)),
    ]
    assert talk.work() == []
    assert talk.tell(0, say.Ask(0, 2, 0)) == [("0.1", say.Wanted(0, 2))]
    assert talk.tell(1, say.Ask(0, 2, 0)) == []
    names = ("params", *NAMES)
    talk.tell(1, *put_of(0, 2, names, seed=9))  # it was not asked
    talk.tell(0, *put_of(0, 2, NAMES))  # not what was asked for
    assert talk.work() == []
    for _ in range(2):
        talk.tell(0, *put_of(0, 2, names))
    said = talk.work()
    assert kinds(said) == ["0.1 Full", "1.1 Full"]
    talk.tell(0, *put_of(1, 2, NAMES))
    assert kinds(talk.work()) == ["0.1 Full", "1.1 Full"]
    holding = talk.shard.parts[0].holding
    assert holding.feedback is None
    assert holding.steps.tolist() == [8] * len(PARTS[0].pieces)


def test_put_values_are_what_the_update_starts_from():
    talk, plain = Talk().begin(), Talk()
    talk.round(1, codec="dct")
    talk.round(2, early=True)
    for worker in (0, 1):
        commit(talk, worker, 2, changed=[0], loads=True)
    talk.tell(0, *put_of(0, 2, ("params", *NAMES)))
    talk.work()
    for worker in (0, 1):
        plain.enter(worker)
    for part in (0, 1):
        plain.tell(0, say.Init(part, ("params", *NAMES)), pack(vectors(part)))
    plain.shard.parts[0].round = 1
    for worker in (0, 1):
        plain.push(0, worker, 2)
    plain.work()
    for name in ("params", "steps"):
        own, want = (getattr(each.shard.parts[0].holding, name) for each in (talk, plain))
        assert own.tobytes() == want.tobytes()


def test_a_skipped_round_takes_what_was_put():
    talk = Talk().begin()
    talk.round(1, early=True, codec="dct")
    for worker in (0, 1):
        commit(talk, worker, skip=worker == 1, changed=[0])
    talk.tell(0, *put_of(0, 1, ["params"]))
    said = talk.work()
    assert [(type(message).__name__, message.skip) for _, message in said] == [("Delta", True)] * 2 + [
        ("Full", True)
    ] * 2
    assert talk.params()[0] == vectors(0)["params"].tobytes()
    assert talk.payloads[-1] == talk.params()[0]


def test_feedback_stays_where_parameters_stay():
    talk = Talk(1).begin()
    talk.push(1, 0, 1, codec="dct")
    talk.work()
    holding = talk.shard.parts[1].holding
    feedback, params = holding.feedback.copy(), holding.params.copy()
    start, stop = holding.part.layout.offsets[1:3]
    params[start:stop] += 1
    holding.put({"params": params})
    feedback[start:stop] = 0
    assert holding.feedback.tobytes() == feedback.tobytes()


@pytest.mark.parametrize(
    ("said", "words"), [({"changed": [0]}, "parameters"), ({"loads": True}, "optimizer's state")]
)
def test_what_one_worker_alone_has_set_is_refused_and_named(said, words):
    talk = Talk().begin()
    talk.round(1, early=True)
    commit(talk, 0)
    commit(talk, 1, **said)
    work = talk.shard.next_work()
    with pytest.raises(Exception, match=words) as caught:
        work.run()
    talk.shard.fail(work, caught.value)
    answers = talk.heard()
    assert kinds(answers) == ["0.1 Refusal", "1.1 Refusal"]
    assert "worker 1 alone" in answers[0][1].message
    if "changed" in said:
        assert "`t0`" in answers[0][1].message


def test_the_next_worker_is_asked_when_the_first_is_gone():
    talk = Talk().begin()
    talk.round(1, early=True)
    for worker in (0, 1):
        commit(talk, worker, changed=[0, 1])
    assert [message for who, message in talk.tell(0, say.Leave()) if who == "1.1"] == [
        say.Wanted(0, 1),
        say.Wanted(1, 1),
    ]
    for part in (0, 1):
        talk.tell(1, *put_of(part, 1, ["params"]))
    assert kinds(talk.work()) == ["1.1 Full"] * 2


def test_payloads_that_do_not_fit_their_names_are_refused():
    talk = Talk().begin()
    talk.round(1, early=True)
    for worker in (0, 1):
        commit(talk, worker, loads=True)
    good = vectors(0)
    for names, payload in (
        (NAMES, pack({"momentum": good["momentum"]})),
        (("momentum", "momentum"), pack({"a": good["momentum"], "b": good["momentum"]})),
        (("velocity",), pack({"a": good["momentum"]})),
        (NAMES, pack({"steps": good["steps"] - 8, "momentum": good["momentum"]})),
        (NAMES, pack({"steps": good["steps"] + 2**60, "momentum": good["momentum"]})),
        (NAMES, EMPTY),
    ):
        refusal(talk.tell(0, say.Put(0, 1, names), payload))
        refusal(talk.tell(0, say.Init(0, names), payload))
    assert "without parameters" in refusal(talk.tell(0, say.Init(0, NAMES), put_of(0, 1, NAMES)[1])).message
    assert talk.tell(0, say.Put(0, 5, NAMES), EMPTY) == []  # for no round that waits
    assert "not on shard" in refusal(talk.tell(0, say.AskState(9, 0))).message


def test_a_clipped_round_is_put_to_as_well():
    talk = Talk(model=table(1.0)).begin()
    talk.round(1, early=True)
    talk.tell(0, say.Scale(1, 0.5))
    commit(talk, 0, changed=[1])
    commit(talk, 1, changed=[1])
    assert kinds(talk.work()) == ["0.1 Full", "1.1 Full"]
    talk.tell(0, *put_of(1, 1, ["params"]))
    assert kinds(talk.work()) == ["0.1 Full", "1.1 Full"]
    assert len(talk.shard._waiting) == 0


def sums_of(talk: Talk, part: int) -> bytes:
    rounds = talk.shard.parts[part]
    return checksums_of(rounds.holding.values, rounds.holding.part)


def outcome(talk: Talk, sums: tuple[bytes, bytes], have: int = 1) -> str:
    """Push round 2 of the second part with these checksums; return why it fails, or nothing."""
    for worker in (0, 1):
        talk.push(1, worker, 2, have=have, checksums=sums[worker])
    work = talk.shard.next_work()
    try:
        work.run()
    except UsageError as error:
        return error.message
    return ""


def test_checksums_are_compared_with_the_shards_own_and_name_parameter_and_worker():
    good = sums_of(Talk().begin(), 1)
    assert len(good) == 4 * len(PARTS[1].pieces)
    right = sums_of(after_one_round(), 1)
    wrong = bytes([*right[:-1], right[-1] ^ 1])
    assert outcome(after_one_round(), (right, right)) == ""
    assert outcome(after_one_round(), (b"", right)) == ""
    assert "`t2` of worker 1" in outcome(after_one_round(), (right, wrong))
    assert "`t2` of worker 0" in outcome(after_one_round(), (wrong, wrong))


def test_checksums_of_an_earlier_version_are_compared_among_workers():
    assert outcome(after_one_round(), (b"12345678", b"12345678"), have=0) == ""
    assert "`t1` of worker 1" in outcome(after_one_round(), (b"12345678", b"1x345678"), have=0)


def test_a_wrong_number_of_checksums_is_refused():
    assert "checksum" in refusal(Talk().begin().push(1, 0, 1, checksums=b"1234")).message


def after_one_round() -> Talk:
    talk = Talk().begin()
    talk.round(1)
    return talk
