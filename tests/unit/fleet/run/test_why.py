"""One sentence about a job."""

import pytest

from shoestring.fleet.jobs import Job
from shoestring.fleet.run.database import Entry
from shoestring.fleet.run.why import duration, explain


def entry(state, note="", steps=0, device="", ends_at=None, is_unwanted=False):
    job = Job("a", "train.py", steps=100)
    return Entry(job, "key", 0.0, state, 32, steps, device, note, ends_at, is_unwanted)


@pytest.mark.parametrize(
    ("one", "is_run", "sentence"),
    [
        (entry("done", steps=100, device="fast"), True, "`a` is done: it took 100 steps, the last on fast."),
        (
            entry("failed", "exit code 3 after 7 steps"),
            False,
            "`a` failed: exit code 3 after 7 steps; see `shoestring fleet logs a`.",
        ),
        (
            entry("running", "`a` runs on fast: it ends first there.", ends_at=1042.0),
            True,
            "`a` runs on fast: it ends first there; done in about 42 s.",
        ),
        (entry("running", device="fast"), True, "`a` runs on fast."),
        (entry("queued", "waits: all 12 v100 are taken"), True, "waits: all 12 v100 are taken."),
        (entry("queued"), True, "`a` waits for the next decision."),
        (
            entry("queued"),
            False,
            "`a` waits, as no process runs this fleet: it starts with `shoestring fleet run`.",
        ),
        (
            entry("running", steps=40),
            False,
            "`a` waits, as no process runs this fleet: "
            "it goes on from a checkpoint at about step 40 with `shoestring fleet run`.",
        ),
        (entry("running", is_unwanted=True), True, "`a` is being removed."),
    ],
)
def test_every_state_has_its_sentence(one, is_run, sentence):
    assert explain(one, is_run=is_run, now=1000.0) == sentence


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-3, "0 s"), (42.4, "42 s"), (600, "10 min"), (7200, "2.0 h"), (432_000, "5.0 days")],
)
def test_durations_are_for_people(seconds, text):
    assert duration(seconds) == text
