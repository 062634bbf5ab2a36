"""The end of a parent is noticed, and nothing else is taken for it."""

import os
import threading

from shoestring.launch.lifeline import Lifeline, watch


def test_the_end_of_the_parent_is_noticed():
    lifeline, gone = Lifeline(), threading.Event()
    watch(os.dup(lifeline.reader), gone.set)
    assert not gone.is_set()
    lifeline.close()
    assert gone.wait(10.0)
    lifeline.close()


def test_what_is_no_pipe_is_not_watched(tmp_path):
    before = threading.active_count()
    with (tmp_path / "file").open("w") as file:
        watch(file.fileno(), lambda: None)
        closed = os.dup(file.fileno())
    os.close(closed)
    watch(closed, lambda: None)
    assert threading.active_count() == before
