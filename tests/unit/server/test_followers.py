"""What a shard says to programs that read and take no part."""

import pytest

from shoestring.model.rules import Rule
from shoestring.server.followers import ASKS, LIMIT, SILENT_S
from shoestring.wire import messages as say
from tests.unit.server.talk import EMPTY, PARTS, Talk, hello_of, table

ALL = [part.index for part in PARTS]


class Follows(Talk):
    """One shard, its workers, and followers by name."""

    def ask(self, message, name: str = "f") -> list:
        """What the shard says to a follower of what it asks."""
        self.shard.handle(f"follower.{name}.0".encode(), message, EMPTY, self.now)
        return self.told(name)

    def told(self, name: str = "f") -> list:
        while self.shard.show_next():
            pass
        return [message for identity, message in self.heard() if identity == f"follower.{name}.0"]

    def round(self, seq: int) -> list:
        """Finish a round of all parts; return what the follower is told."""
        told = []
        for part in PARTS:
            for worker in range(self.workers):
                self.push(part.index, worker, seq)
            told += self.finished()
        return told

    def finished(self) -> list:
        told = []
        while (work := self.shard.next_work()) is not None:
            told += [message for identity, message in self.heard() if identity.startswith("follower")]
            work.run()
            self.shard.finish(work)
        return told + [message for identity, message in self.heard() if identity.startswith("follower")]


def follow(**changed) -> say.Follow:
    return say.Follow(**({"protocol": say.PROTOCOL, "shard": 0, "shards": 1} | changed))


def versions(said) -> list[tuple[int, int]]:
    """The part and the round of each answer that brings values."""
    return [(message.part, message.seq) for message in said]


def test_a_follower_waits_for_the_model_and_is_told_when_it_is_there():
    talk = Follows()
    assert talk.ask(follow()) == [say.Followed("run", -1)]
    talk.shard.handle(b"0.1", hello_of(0, talk.workers), talk.packed, 0.0)
    said = [message for identity, message in talk.heard() if identity.startswith("follower")]
    assert said == [say.Followed("run", 0)]
    assert talk.ask(follow(knows=True)) == [say.Followed("run", 0)]
    assert talk.payloads == [b""]


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"protocol": 1}, "speaks protocol 1"),
        ({"shard": 1}, "looks for shard 1 of 1"),
        ({"shards": 2}, "looks for shard 0 of 2"),
        ({"run": "other"}, "of run `other`"),
    ],
)
def test_who_looks_for_another_shard_is_told_which_this_is(changed, what):
    (refusal,) = Follows().begin().ask(follow(**changed))
    assert what in refusal.message
    assert not Follows().shard.is_followed


def test_a_mean_is_not_followed():
    talk = Follows(model=table(rule=Rule("mean")))
    talk.hello(0)
    (refusal,) = talk.ask(follow())
    assert "its shards have none to read" in refusal.message
    assert not talk.shard.is_followed


def test_parts_are_sent_as_they_come_to_the_round_and_not_later():
    talk = Follows().begin()
    talk.ask(follow())
    assert versions(talk.ask(say.Fetch(0))) == [(part, 0) for part in ALL]
    assert talk.payloads == [bytes(4 * part.size) for part in PARTS]
    assert talk.ask(say.Fetch(1)) == talk.ask(say.Fetch(2)) == []
    talk.round(1)
    assert talk.ask(say.Fetch(0)) == [say.Passed(0, 1, True)]
    assert versions(talk.ask(say.Fetch(1))) == [(part, 1) for part in ALL]


def test_a_round_that_was_asked_for_in_time_comes_by_itself():
    talk = Follows().begin()
    talk.ask(follow())
    talk.ask(say.Fetch(1, True, True))
    talk.ask(say.Fetch(2, True, True))
    assert sorted(versions(talk.round(1) + talk.told())) == [(part, 1) for part in ALL]
    assert sorted(versions(talk.round(2) + talk.told())) == [(part, 2) for part in ALL]
    assert talk.round(3) == []  # it was not asked for


def test_a_part_is_sent_before_the_next_update_changes_it_though_the_shard_is_busy():
    talk = Follows().begin()
    talk.ask(follow())
    talk.ask(say.Fetch(1))
    assert talk.round(1) == []  # nobody had a moment to send it
    assert sorted(versions(talk.round(2))) == [(part, 1) for part in ALL]


def test_a_part_that_has_gone_on_ends_the_round_for_all_others():
    talk = Follows().begin()
    talk.ask(follow())
    for worker in range(2):
        talk.push(ALL[0], worker, 1)
    talk.finished()
    assert talk.ask(say.Fetch(0)) == [say.Passed(0, 1, True)]  # part 1 would still have it: nothing is sent


def test_a_follower_takes_no_part():
    talk = Follows().begin()
    talk.ask(follow())
    for message in (say.Enter(1), say.Pull(0, 0), say.Init(0), say.Commit(1), say.Scale(1, 0.5)):
        (refusal,) = talk.ask(message)
        assert "it may only pull" in refusal.message
    assert talk.ask(say.Beat(2.5)) == [say.Beat(2.5)]
    for worker in range(2):
        talk.tell(worker, say.Leave())
    assert not any(member.present for member in talk.shard.members)
    assert talk.shard.is_followed
    assert talk.ask(say.Leave()) == [say.Left()]
    assert not talk.shard.is_followed


def test_what_is_kept_of_followers_is_bounded():
    talk = Follows().begin()
    for number in range(LIMIT):
        assert len(talk.ask(follow(), str(number))) == 1
        for seq in range(1, 50):
            talk.ask(say.Fetch(seq), str(number))
    assert all(len(one.asks) == ASKS for one in talk.shard._followers.known.values())
    (refusal,) = talk.ask(follow(), "more")
    assert f"{LIMIT} programs follow this run already" in refusal.message
    talk.now += SILENT_S + 1
    talk.ask(say.Beat(0.0), "0")
    assert isinstance(talk.ask(follow(), "more")[0], say.Followed)
    (refusal,) = talk.ask(say.Fetch(1), "1")  # the one that was silent longest
    assert "gave its place to another" in refusal.message
    assert talk.ask(say.Beat(1.0), "0") == [say.Beat(1.0)]


def test_followers_are_told_of_the_end():
    talk = Follows().begin()
    talk.ask(follow())
    talk.shard.end()
    assert talk.told() == [say.Over()]
    talk.shard.end()
    assert talk.told() == []


def test_a_pushed_round_is_sent_as_the_workers_own_difference():
    talk = Follows(workers=1).begin()
    talk.ask(follow())
    for seq in (1, 2):
        talk.ask(say.Fetch(seq, True, True))
        talk.push(0, 0, seq, codec="dct")
        (answer,) = talk.finished() + talk.told()
        assert (answer.part, answer.seq, answer.version) == (0, seq, seq)
        assert isinstance(answer, say.Delta)
