"""When a checkpoint is due."""

from pathlib import Path

from shoestring.checkpoint.schedule import Schedule, schedule_for


def test_every_third_round_is_due():
    assert [seq for seq in range(1, 10) if Schedule(3).is_due(seq)] == [3, 6, 9]


def test_none_is_due_without_a_number_of_rounds_or_a_folder():
    for schedule in (Schedule(), schedule_for(None, 3), schedule_for(Path("x"), 0)):
        assert not any(schedule.is_due(seq) for seq in range(1, 10))
    assert schedule_for(Path("x"), 3) == Schedule(3)
