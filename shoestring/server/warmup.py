"""Load or compile whatever a shard may compute with, before a time is taken.

A shard that trains loads what it needs when it needs it.
"""

import numpy as np

from shoestring.codec.warmup import warm_up_dct
from shoestring.model.rules import Rule
from shoestring.model.statistics import warm_up_history
from shoestring.server import rules

_RULES = (
    (Rule("sgd"), (0.1, 0.0, 0.0, 0.0)),
    (Rule("sgd", momentum=True), (0.1, 0.9, 0.0, 0.0)),
    (Rule("adam"), (0.1, 0.9, 0.99, 1e-8, 0.0)),
    (Rule("adam", amsgrad=True), (0.1, 0.9, 0.99, 1e-8, 0.0)),
)


def warm_up() -> None:
    """Run every kernel once: the rules on nothing, the default codec on a few blocks."""
    nothing = np.empty(0, np.float32)
    for rule, hyper in _RULES:
        for change in (rules.apply, rules.update):
            change(rule, hyper, nothing, nothing, dict.fromkeys(rule.state_names, nothing), 1)
    rules.sum_squares(nothing)
    warm_up_history()
    warm_up_dct()
