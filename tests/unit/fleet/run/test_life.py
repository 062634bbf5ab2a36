"""How fast a job is, from its events."""

import pytest

from shoestring.fleet.engine.base import Task
from shoestring.fleet.run.life import Life
from tests.unit.fleet.scripted import ScriptedEngine, cpu


@pytest.fixture
def life(tmp_path):
    engine = ScriptedEngine((cpu("fast"),))
    task = Task("a", ["train.py"], (cpu("fast"),), tmp_path)
    engine.start(task).step_to(500)  # an earlier life
    running = engine.start(task)
    yield Life("a", "work", task, running, 1.0)
    engine.close()


def steps(life, rows):
    for step, at in rows:
        life._step(step, at, {"worker": 0})


def test_events_of_earlier_lives_do_not_count(life):
    life.follow()
    assert life.steps is None
    life.running.step_to(501)
    life.follow()
    assert life.steps == 501


def test_the_first_steps_are_passed_over(life):
    steps(life, [(1, 0.0), (2, 9.0), (4, 10.0), (14, 15.0)])
    assert life.speed() == (2.0, 5.0)
    assert life.steps == 14


def test_a_short_window_says_nothing(life):
    assert life.speed() is None
    steps(life, [(1, 0.0), (4, 1.0), (6, 20.0)])
    assert life.speed() is None  # two steps only
    steps(life, [(20, 21.0)])
    assert life.speed() == (16 / 20, 20.0)


def test_a_partner_begins_a_new_window(life):
    steps(life, [(1, 0.0), (4, 1.0), (24, 11.0)])
    assert life.speed() == (2.0, 10.0)
    life.share_with("other")
    assert life.speed() is None
    steps(life, [(25, 12.0), (35, 22.0)])
    assert life.speed() == (1.0, 10.0)
    life.share_with("other")  # no change
    assert life.speed() == (1.0, 10.0)
    life.restart_window()
    assert life.speed() is None


def test_what_is_no_step_is_passed_over(life):
    for fields in ({"step": "7"}, {"step": None}, {}):
        life.running.log.write("step", worker=0, **fields)
    life.running.log.write("join", step=3)
    life.running.log.write("step", worker=1, step=99)  # another worker's
    life.follow()
    assert life.steps is None
