"""Policies as text, and what is refused."""

import pytest

from shoestring.errors import UsageError
from shoestring.worker.rounds.policy import Async, Bounded, EveryStep, LocalSteps, make_policy

TEXTS = {
    "every": EveryStep(),
    "every:delay=1": EveryStep(delay=1),
    "every:delay=none,warmup=3": EveryStep(delay=None, warmup=3),
    "local:16": LocalSteps(16),
    "local:h=4,outer=nesterov,lr=0.5,momentum=0.8": LocalSteps(4, "nesterov", lr=0.5, momentum=0.8),
    "local:4,delay=2": LocalSteps(4, delay=2),
    "local:4,keep=no": LocalSteps(4, keep=False),
    "local:4,keep=yes": LocalSteps(4, keep=True),
    "bounded:4": Bounded(4),
    "async": Async(),
    "async:warmup=10": Async(warmup=10),
}
NONSENSE = [
    *("", "never", "local", "local:0", "local:x", "every:delay=2", "every:warmup=-1", "bounded:-1"),
    *("async:h=3", "local:4,outer=median", "local:4,momentum=1", "local:4,keep=2"),
    *("local:4,delay=5", "local:4,delay=-1"),
]


@pytest.mark.parametrize("text", TEXTS)
def test_text_and_policy_are_one(text: str) -> None:
    assert make_policy(text) == TEXTS[text]
    assert make_policy(TEXTS[text]) is TEXTS[text]


@pytest.mark.parametrize("text", NONSENSE)
def test_what_makes_no_sense_is_refused_with_a_hint(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        make_policy(text)
    assert caught.value.hint
