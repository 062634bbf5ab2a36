"""A step is taken whole: pushes that came during backward wait for the commits of all their workers."""

from shoestring.wire import messages as say
from tests.unit.server.talk import PARTS, Talk, kinds, refusal, table


def commit(talk: Talk, worker: int, seq: int = 1, **changed) -> list:
    return talk.tell(worker, say.Commit(seq, **changed))


def test_early_pushes_are_summed_and_wait_for_the_commits_of_all():
    talk, plain = Talk().begin(), Talk().begin()
    assert talk.round(1, early=True) == []
    assert all(rounds.work.total is not None for rounds in talk.shard.parts.values())
    commit(talk, 0)
    assert talk.work() == []
    assert talk.tell(0, say.Ask(0, 1, 0)) == []
    commit(talk, 1)
    assert kinds(talk.work()) == ["0.1 Full", "1.1 Full"] * 2
    plain.round(1)
    assert talk.params() == plain.params()
    assert commit(talk, 1) == []  # late, or again
    assert len(talk.shard._waiting) == 0


def test_the_last_push_may_carry_the_commit():
    talk, plain = Talk().begin(), Talk().begin()
    for worker in (0, 1):
        talk.push(1, worker, 1, early=True)
    for worker in (0, 1):
        talk.push(0, worker, 1, early=True, commit=say.Commit(1))
    assert kinds(talk.work()) == ["0.1 Full", "1.1 Full"] * 2
    plain.round(1)
    assert talk.params() == plain.params()
    assert "another round" in refusal(talk.push(0, 0, 2, early=True, commit=say.Commit(1))).message
    talk.push(1, 0, 2, early=True)
    talk.push(1, 1, 2, early=True)
    talk.push(0, 0, 2, early=True, commit=say.Commit(2))
    talk.push(0, 1, 2, early=True, commit=say.Commit(2, skip=True))
    assert set(kinds(talk.work())) == {"0.1 Delta", "1.1 Delta"}


def test_commits_that_come_first_let_each_part_go_on_by_itself():
    talk = Talk().begin()
    for worker in (0, 1):
        commit(talk, worker)
        talk.push(1, worker, 1, early=True)
    work = talk.shard.next_work()
    work.run()
    assert work.reply is not None
    talk.shard.finish(work)
    assert kinds(talk.heard()) == ["0.1 Full", "1.1 Full"]


def test_one_worker_that_skips_skips_all_parts_and_the_first_word_counts():
    talk = Talk().begin()
    before = talk.params()
    talk.round(1, early=True)
    commit(talk, 0)
    commit(talk, 1, skip=True)
    commit(talk, 1)
    said = talk.work()
    assert kinds(said) == ["0.1 Delta", "1.1 Delta"] * 2
    assert all(message.skip and message.last and not message.codec for _, message in said)
    assert talk.params() == before
    assert {tuple(rounds.holding.steps) for rounds in talk.shard.parts.values()} == {(0,), (0, 0)}
    assert not any(message.skip for _, message in talk.round(2))


def test_a_worker_that_dies_before_its_commit_is_left_out_of_the_round():
    talk, alone = Talk().begin(), Talk().begin()
    talk.round(1, early=True)
    commit(talk, 0)
    talk.tell(1, say.Leave())
    assert kinds(talk.work()) == ["0.1 Full"] * 2
    alone.tell(1, say.Leave())
    for part in PARTS:
        alone.push(part.index, 0, 1)
    alone.work()
    assert talk.params() == alone.params()


def test_a_worker_that_dies_after_its_commit_counts():
    talk, plain = Talk().begin(), Talk().begin()
    talk.round(1, early=True)
    commit(talk, 1)
    talk.tell(1, say.Leave())
    commit(talk, 0)
    talk.work()
    plain.round(1)
    assert talk.params() == plain.params()


def test_a_worker_that_dies_while_its_push_is_summed_is_left_out():
    talk = Talk().begin()
    for worker in (0, 1):
        talk.push(0, worker, 1, early=True)
    work = talk.shard.next_work()
    talk.tell(1, say.Leave())
    work.run()
    talk.shard.finish(work)
    commit(talk, 0)
    assert kinds(talk.work()) == ["0.1 Full"]
    assert len(talk.shard._waiting) == 0


def test_a_round_whose_workers_all_die_before_their_commits_is_given_up():
    talk = Talk().begin()
    talk.round(1, early=True)
    for worker in (0, 1):
        talk.tell(worker, say.Leave())
    assert talk.work() == []
    assert len(talk.shard._waiting) == 0
    assert not any(rounds.busy or rounds._open for rounds in talk.shard.parts.values())


def test_a_new_life_does_not_inherit_a_commit():
    talk = Talk().begin()
    talk.round(1, early=True)
    commit(talk, 1, seq=2)
    commit(talk, 0)
    talk.hello(1, 2)
    assert kinds(talk.work()) == ["0.1 Full"] * 2
    assert talk.tell(1, say.Enter(2), life=2)[0][1].agreed
    for part in PARTS:
        talk.push(part.index, 0, 2, early=True)
        talk.push(part.index, 1, 2, early=True, life=2)
    commit(talk, 0, seq=2)
    assert talk.work() == []
    talk.tell(1, say.Commit(2), life=2)
    assert len(talk.work()) == 4


def test_a_clipped_round_tells_its_norm_before_the_commits_and_waits_for_both():
    talk, plain = Talk(model=table(1.0)).begin(), Talk(model=table(1.0)).begin()
    assert kinds(talk.round(1, early=True)) == ["0.1 Norm", "1.1 Norm"] * 2
    talk.tell(0, say.Scale(1, 0.5))
    assert talk.work() == []
    for worker in (0, 1):
        commit(talk, worker)
    assert kinds(talk.work()) == ["0.1 Full", "1.1 Full"] * 2
    plain.round(1)
    plain.tell(0, say.Scale(1, 0.5))
    plain.work()
    assert talk.params() == plain.params()
    talk.round(2, early=True)
    for worker in (0, 1):
        commit(talk, worker, seq=2, skip=worker == 1)
    assert kinds(talk.work()) == ["0.1 Delta", "1.1 Delta"] * 2  # no scale is needed
    assert talk.tell(0, say.Scale(2, 0.5)) == []


def test_bounded_pushes_wait_for_their_own_commit_and_for_no_other():
    talk = Talk().begin()
    for seq in (1, 2):
        talk.push(0, 0, seq, bound=9, early=True)
    talk.push(0, 1, 1, bound=9, early=True)
    assert talk.work() == []
    commit(talk, 0, seq=2)
    assert talk.work() == []  # not before the one it follows
    commit(talk, 1)
    assert kinds(talk.work()) == ["1.1 Full"]
    commit(talk, 0, skip=True)
    assert [(who, message.seq) for who, message in talk.work()] == [("0.1", 1), ("0.1", 2)]
    rounds = talk.shard.parts[0]
    assert (rounds.ledger.seq(0), rounds.version, rounds.holding.steps.tolist()) == (2, 3, [2])


def test_parameters_can_be_read_while_a_sum_waits_for_commits():
    talk = Talk().begin()
    talk.round(1, early=True)
    assert kinds(talk.tell(0, say.Pull(0, 0))) == ["0.1 Full"]
