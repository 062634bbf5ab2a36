"""The master takes every update as if workers held all of it; what they hold follows, bit for bit."""

import numpy as np
import pytest

from shoestring.codec.registry import make
from shoestring.errors import NonFiniteError
from shoestring.model.parts import cut
from shoestring.model.precision import Precision
from shoestring.model.rules import Rule
from shoestring.server.holding import Holding
from shoestring.server.masters import MasterHolding
from shoestring.wire import messages as say
from tests.unit.server.talk import PARTS, Talk, push_of, table

(PART,) = cut([(40, 30), (17,), (), (200,)])
RULE = Rule("adamw")
HYPER = [[0.01, 0.9, 0.99, 1e-8, 0.1], [0.002, 0.9, 0.99, 1e-8, 0.0]]
ALL = np.ones(4, bool)
KINDS = {
    "bfloat16": ["bfloat16"] * 4,
    "float16": ["float16"] * 4,
    "mixed": ["bfloat16", "float32", "float16", "bfloat16"],
}


def gradient(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(PART.size).astype(np.float32)


def holding(dtypes, rule: Rule = RULE, groups=(0, 1, 0, 1)) -> MasterHolding:
    held = MasterHolding(PART, rule, groups, precision=Precision(PART, dtypes))
    held.params[:] = gradient(99)
    held.precision.round(held.params)  # as the first worker brings them
    return held


def follow(held: MasterHolding, mine: np.ndarray, reply) -> np.ndarray:
    """What a worker does."""
    if reply.is_full:
        mine = held.precision.unpack(reply.payload.data).copy()
    elif reply.codec:
        make(reply.codec).decode(reply.payload, PART.layout, mine, 1.0)
    held.precision.round(mine)
    return mine


def advance(held: Holding, seq: int, codec: str, used=ALL, **changed):
    fields = {"scale": 0.5, "hyper": HYPER, "used": used, "codec": codec, "seq": seq} | changed
    return held.advance(gradient(seq), **fields)


CODECS = [["float32"], ["dct"], ["dct", "float32"], ["int8", "float16", "float32"], ["topk"], ["bfloat16"]]


@pytest.mark.parametrize("dtypes", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("codecs", CODECS, ids=" ".join)
def test_a_worker_holds_the_same_bits_and_the_master_is_that_of_a_lossless_run(codecs, dtypes):
    held, exact = holding(dtypes), Holding(PART, RULE, (0, 1, 0, 1))
    exact.params[:] = held.params
    mine = held.params.copy()
    for seq in range(1, 13):
        used = ALL if seq % 4 else np.array([True, False, True, False])
        if seq % 5 == 0:
            reply = held.hold(seq)
            exact.hold(seq)
        else:
            reply = advance(held, seq, codecs[seq % len(codecs)], used)
            advance(exact, seq, "float32", used)
        mine = follow(held, mine, reply)
        assert (reply.version, reply.seq) == (seq, seq)
        assert mine.tobytes() == held.values.tobytes()
        assert held.params.tobytes() == exact.params.tobytes()
        for name, vector in exact.state.items():
            assert held.state[name].tobytes() == vector.tobytes()
        assert held.steps.tolist() == exact.steps.tolist()
        # A worker that comes now gets what the others hold.
        assert follow(held, np.empty(0), held.full(seq)).tobytes() == mine.tobytes()


@pytest.mark.parametrize("dtypes", KINDS.values(), ids=KINDS)
def test_an_uncompressed_answer_is_the_master_rounded_in_as_few_bytes(dtypes):
    held = holding(dtypes)
    reply = advance(held, 1, "float32")
    want = held.params.copy()
    held.precision.round(want)
    assert held.values.tobytes() == want.tobytes() != held.params.tobytes()
    wide = sum(run.stop - run.start for run in held.precision.runs if run.dtype == "float32")
    assert reply.payload.nbytes == 2 * PART.size + 2 * wide


def test_what_is_too_small_for_two_bytes_adds_up_in_the_master_and_costs_next_to_nothing():
    held = holding(KINDS["bfloat16"], Rule("average"), (0,) * 4)
    held.params[:] = 1.0
    mine = held.params.copy()
    sizes = []
    for seq in range(1, 9):  # the next number after 1 is 1 + 2 ** -7: half of it is not reached before 5
        small = np.full(PART.size, 2.0**-10, np.float32)
        reply = held.advance(small, scale=1.0, hyper=[[]] * 2, used=ALL, codec="dct", seq=seq)
        mine = follow(held, mine, reply)
        sizes.append(reply.payload.nbytes)
        assert (mine != 1).any() == (seq >= 5)
    assert (held.params == 1 + 2.0**-7).all()
    assert max(sizes[:4]) < 40
    last = held.advance(
        np.zeros(PART.size, np.float32), scale=1.0, hyper=[[]] * 2, used=ALL, codec="float32", seq=9
    )
    assert (follow(held, mine, last) == 1 + 2.0**-7).all()
    assert not held.has_feedback


def test_memory_that_is_shared_has_what_gives_the_same_bits():
    held = holding(KINDS["mixed"])
    held.slots = (np.zeros(PART.size, np.float32),)
    advance(held, 1, "dct")
    mine = held.values.copy()
    for codec in ("dct", "float32"):
        mine = follow(held, mine, advance(held, 2, codec, slot=0))
        shared = held.full(2, 0)
        assert shared.slot == 0
        assert follow(held, np.empty(0), shared).tobytes() == mine.tobytes() == held.values.tobytes()


@pytest.mark.parametrize("codec", ["dct", "int8"])
def test_what_becomes_too_large_for_half_precision_is_named(codec):
    held = holding(KINDS["float16"], Rule("average"), (0,) * 4)
    huge = np.full(PART.size, 1e5, np.float32)
    with pytest.raises(NonFiniteError, match="part 0 at round 7"):
        held.advance(huge, scale=1.0, hyper=[[]] * 2, used=ALL, codec=codec, seq=7)


def test_uncompressed_it_is_infinity_as_in_torch():
    held = holding(KINDS["float16"], Rule("average"), (0,) * 4)
    huge = np.full(PART.size, 1e5, np.float32)
    reply = held.advance(huge, scale=1.0, hyper=[[]] * 2, used=ALL, codec="float32", seq=7)
    assert np.isinf(follow(held, np.empty(0), reply)).all()
    assert np.isfinite(held.params).all()


@pytest.mark.parametrize(
    ("rule", "dtype", "kind"),
    [
        (Rule("sgd", momentum=True), "bfloat16", MasterHolding),
        (Rule("sgd", momentum=True), "float32", Holding),
        (Rule("sgd", momentum=True), "float64", Holding),
        (Rule("average"), "bfloat16", Holding),
        (Rule("outer_nesterov"), "float16", Holding),
    ],
)
def test_a_shard_has_a_master_where_it_updates_what_workers_keep_in_two_bytes(rule, dtype, kind):
    talk = Talk(1, table(rule=rule, dtype=dtype))
    talk.hello(0)
    assert {type(rounds.holding) for rounds in talk.shard.parts.values()} == {kind}


def test_gradients_come_in_four_bytes_and_parameters_go_in_two():
    talk = Talk(2, table(dtype="bfloat16")).begin()
    for part in PARTS:
        for worker in range(2):
            assert push_of(part.index, worker, 1)[1].nbytes == 4 * part.size
            talk.push(part.index, worker, 1)
    answers = [message for _, message in talk.work()]
    assert all(isinstance(message, say.Full) for message in answers)
    sizes = {message.part: len(payload) for message, payload in zip(answers, talk.payloads, strict=True)}
    assert sizes == {part.index: 2 * part.size for part in PARTS}
