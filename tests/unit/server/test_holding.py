"""What a part holds is what every worker that follows its replies holds."""

import numpy as np
import pytest

from shoestring.codec.registry import make
from shoestring.errors import NonFiniteError
from shoestring.model.parts import cut
from shoestring.model.rules import Rule
from shoestring.server import rules
from shoestring.server.holding import Holding

PART = cut([(40, 30), (17,), (), (200,)])[0]
RULE = Rule("sgd", momentum=True)
HYPER = [[0.5, 0.9, 0.0, 0.01], [0.25, 0.0, 0.0, 0.0]]
ALL = np.ones(4, bool)


def gradient(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(PART.size).astype(np.float32)


def holding(groups=(0, 0, 0, 0)) -> Holding:
    held = Holding(PART, RULE, groups)
    held.params[:] = gradient(99)
    return held


def follow(params: np.ndarray, reply) -> np.ndarray:
    if reply.is_full:
        return reply.payload.view(np.float32).copy()
    if reply.codec:
        make(reply.codec).decode(reply.payload, PART.layout, params, 1.0)
    return params


@pytest.mark.parametrize("codecs", [["float32"], ["dct"], ["dct", "float32"], ["int8", "float16", "float32"]])
def test_a_worker_that_follows_the_replies_holds_the_same_bits(codecs):
    held = holding()
    mine = held.params.copy()
    for seq in range(1, 13):
        if seq % 5 == 0:
            reply = held.hold(seq)
        else:
            codec = codecs[seq % len(codecs)]
            reply = held.advance(gradient(seq), scale=0.5, hyper=HYPER, used=ALL, codec=codec, seq=seq)
        mine = follow(mine, reply)
        assert (reply.version, reply.seq) == (seq, seq)
        assert mine.tobytes() == held.params.tobytes()


def test_lossless_is_the_rule_itself():
    held = holding((0, 1, 0, 1))
    params, state = held.params.copy(), {"momentum": np.zeros(PART.size, np.float32)}
    for seq in range(1, 5):
        total = gradient(seq)
        for piece, group in enumerate((0, 1, 0, 1)):
            own = slice(*PART.layout.offsets[piece : piece + 2])
            slices = {name: vector[own] for name, vector in state.items()}
            rules.apply(RULE, HYPER[group], params[own], total[own].copy(), slices, seq, 0.5)
        held.advance(total, scale=0.5, hyper=HYPER, used=ALL, codec="float32", seq=seq)
        assert held.params.tobytes() == params.tobytes()
        assert held.state["momentum"].tobytes() == state["momentum"].tobytes()


def test_what_a_lossy_reply_leaves_out_comes_with_a_lossless_one():
    lossy, exact = holding(), holding()
    for held, codec in ((lossy, "int8"), (exact, "float32")):
        held.rule = Rule("average")
        held.state = {}
        held.advance(gradient(1), scale=1.0, hyper=[[]], used=ALL, codec=codec, seq=1)
    assert lossy.params.tobytes() != exact.params.tobytes()
    before = lossy.params + lossy.feedback
    lossy.advance(np.zeros(PART.size, np.float32), scale=1.0, hyper=[[]], used=ALL, codec="float32", seq=2)
    assert lossy.feedback is None
    assert lossy.params.tobytes() == before.tobytes()


@pytest.mark.parametrize("codec", ["float32", "dct"])
def test_pieces_without_a_gradient_keep_values_state_and_step(codec):
    held = holding()
    held.advance(gradient(1), scale=1.0, hyper=HYPER, used=ALL, codec="float32", seq=1)
    before, state = held.params.copy(), held.state["momentum"].copy()
    used = np.array([True, False, True, False])
    held.advance(gradient(2), scale=1.0, hyper=HYPER, used=used, codec=codec, seq=2)
    assert held.steps.tolist() == [2, 1, 2, 1]
    for piece, is_used in enumerate(used):
        own = slice(*PART.layout.offsets[piece : piece + 2])
        assert (held.state["momentum"][own].tobytes() == state[own].tobytes()) != is_used
        if not is_used and codec == "float32":
            assert held.params[own].tobytes() == before[own].tobytes()


def test_a_full_reply_does_not_change_with_the_part():
    held = holding()
    reply = held.full(3)
    want = held.params.tobytes()
    held.params += 1
    assert reply.payload.tobytes() == want


def test_an_update_that_overflows_is_named():
    held = holding()
    huge = np.full(PART.size, 3e38, np.float32)
    with pytest.raises(NonFiniteError, match="part 0 at round 7"):
        held.advance(huge, scale=1.0, hyper=[[1e9, 0.0, 0.0, 0.0]], used=ALL, codec="dct", seq=7)
