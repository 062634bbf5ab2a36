"""Which pushes a part takes: everything but the payload's own bytes is checked before it is kept.

So what is wrong with a push is said to the worker that sent it, and an update that has
begun can fail only for the bytes of one contribution, before anything has changed.
"""

from collections.abc import Sequence

from shoestring.codec.registry import LOSSLESS, codec_of
from shoestring.errors import StreamError, WireError
from shoestring.model.statistics import unpack
from shoestring.server.holding import Holding
from shoestring.wire.messages import WHOLE_ROUND, Push

CODEC_TEXT_LIMIT = 128
HYPER_LIMIT = 1e18  # what rules make of such numbers is still a float32
WEIGHTS = (1e-30, 1e30)


def check_push(push: Push, payload: memoryview, holding: Holding) -> None:
    """Raise unless the part's work can do with a push whatever else it finds in the payload."""
    problem, pieces = "", len(holding.part.pieces)
    if len(push.codec) > CODEC_TEXT_LIMIT or len(push.reply) > CODEC_TEXT_LIMIT or len(push.plan) > 1024:
        problem = "a text is too long"
    elif not WEIGHTS[0] <= push.weight <= WEIGHTS[1]:
        problem = f"its weight is {push.weight}"
    elif not 0 <= push.pace < HYPER_LIMIT:
        problem = f"its pace is {push.pace}"
    elif push.seq < 1 or push.have < 0 or push.bound < WHOLE_ROUND:
        problem = "a number is out of range"
    elif len(push.used) not in (0, (pieces + 7) // 8):
        problem = "the map of used pieces has the wrong length"
    elif len(push.hyper) <= max(holding.groups) or not all(_fits(holding, group) for group in push.hyper):
        problem = "the hyperparameters do not fit the rule"
    if problem:
        raise WireError(f"bad push of part {push.part}: {problem}", hint="check both sides' versions")
    if push.statistics:
        unpack(push.statistics, holding.history.layers)
    is_raw = push.codec == LOSSLESS  # the values themselves, without a stream around them
    most = holding.params.nbytes if is_raw else codec_of(push.codec).max_bytes(holding.part.layout)
    if push.skip:
        most = 0
    if payload.nbytes > most or (is_raw and payload.nbytes != most):
        raise StreamError(
            f"{payload.nbytes} bytes of `{push.codec}` for part {push.part}, the most is {most}",
            hint="check both sides' versions",
        )
    codec_of(push.reply)


def _fits(holding: Holding, values: Sequence[float]) -> bool:
    """Say whether the rule can work with these hyperparameters: it must not find out in mid-update."""
    names = holding.rule.hyper_names
    return len(values) == len(names) and all(
        abs(value) <= HYPER_LIMIT
        and (not name.startswith("beta") or 0 <= value < 1)
        and (name != "momentum" or value == 0 or "momentum" in holding.state)
        for name, value in zip(names, values, strict=True)
    )
