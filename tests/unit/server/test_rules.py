"""Every rule equals its definition in NumPy, however it is cut and run; wrong arguments are refused."""

import itertools
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from typing import Any

import msgspec
import numpy as np
import pytest

from shoestring.codec.base import Vector
from shoestring.errors import RuleError
from shoestring.model.rules import Rule
from shoestring.server import rules
from tests.unit.server.rule_cases import CASES, Case, State, new_state

SIZES = [0, 1, 2, 15, 16, 17, 63, 1000]  # around what a vector register holds, and what is left over


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


def draw(rng: np.random.Generator, size: int) -> Vector:
    """Values of many magnitudes, some of them zero."""
    values = rng.standard_normal(size) * 10.0 ** rng.integers(-6, 3, size)
    return np.where(rng.random(size) < 0.05, 0.0, values).astype(np.float32)


def same_bits(found: Vector, expected: Vector) -> None:
    assert found.dtype == expected.dtype == np.float32
    np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))


def same_states(found: State, expected: State) -> None:
    assert found.keys() == expected.keys()
    for name in found:
        same_bits(found[name], expected[name])


def define_update(
    case: Case, params: Vector, gradient: Vector, state: State, step: int, scale: float
) -> Vector:
    """The update in plain NumPy, one float32 operation after another."""
    f = np.float32
    rule, hyper = case.rule, dict(zip(case.rule.hyper_names, case.hyper_of(step), strict=True))
    if step == 1:
        state.update((name, np.zeros_like(params)) for name in rule.state_names)
    g = gradient * f(scale)
    if rule.kind == "average":
        return g
    if rule.maximize or rule.kind == "outer_nesterov":
        g = -g
    lr, decay = hyper["lr"], hyper.get("weight_decay", 0)
    if rule.kind != "adamw" and decay != 0:
        g = g + f(decay) * params
    if rule.kind in ("sgd", "outer_nesterov"):
        momentum = hyper["momentum"]
        if momentum != 0:
            share = 1.0 if step == 1 else 1.0 - hyper.get("dampening", 0)
            state["momentum"] = f(momentum) * state["momentum"] + f(share) * g
            is_nesterov = rule.nesterov or rule.kind == "outer_nesterov"
            g = g + f(momentum) * state["momentum"] if is_nesterov else state["momentum"]
        return f(-lr) * g
    beta1, beta2 = hyper["beta1"], hyper["beta2"]
    mean = state["exp_avg"] + f(1 - beta1) * (g - state["exp_avg"])
    square = f(beta2) * state["exp_avg_sq"] + f(1 - beta2) * g * g
    state.update(exp_avg=mean, exp_avg_sq=square)
    if rule.amsgrad:
        square = state["max_exp_avg_sq"] = np.maximum(state["max_exp_avg_sq"], square)
    root = np.sqrt(square) / f((1 - beta2**step) ** 0.5) + f(hyper["eps"])
    moved = f(-lr / (1 - beta1**step)) * mean / root
    return moved + f(-lr * decay) * params if rule.kind == "adamw" and decay != 0 else moved


@pytest.mark.parametrize("size", SIZES)
def test_update_equals_its_definition(case, size):
    rng = np.random.default_rng(size)
    params = draw(rng, size)
    found, expected = new_state(case.rule, size), {}
    for step in range(1, 30):
        scale = rng.choice([1.0, 1 / 3, 0.25])
        gradient = draw(rng, size)
        want = define_update(case, params, gradient, expected, step, scale)
        before = params.copy()
        rules.update(case.rule, case.hyper_of(step), params, gradient, found, step, scale)
        same_bits(gradient, want)
        same_states(found, expected)
        same_bits(params, before)
        params += gradient


@pytest.mark.parametrize("size", SIZES)
def test_apply_adds_the_update(case, size):
    rng = np.random.default_rng(size)
    params = draw(rng, size)
    params[: size // 8] *= -0.0
    applied, updated = new_state(case.rule, size), new_state(case.rule, size)
    other = params.copy()
    for step in range(1, 30):
        gradient = draw(rng, size)
        change = gradient.copy()
        rules.update(case.rule, case.hyper_of(step), params, change, updated, step, 0.3)
        rules.apply(case.rule, case.hyper_of(step), other, gradient, applied, step, 0.3)
        params += change
        same_bits(other, params)
        same_states(applied, updated)


@pytest.mark.parametrize("run", [rules.update, rules.apply])
def test_pieces_give_what_the_whole_gives(case, run):
    size, cuts = 1000, [0, 1, 17, 17, 500, 983, 1000]
    rng = np.random.default_rng(7)
    whole, state = draw(rng, size), new_state(case.rule, size)
    pieces, pieces_state = whole.copy(), new_state(case.rule, size)

    def run_piece(own: slice, gradient: Vector, step: int) -> None:
        own_state = {name: vector[own] for name, vector in pieces_state.items()}
        run(case.rule, case.hyper_of(step), pieces[own], gradient[own], own_state, step, 0.1)

    with ThreadPoolExecutor(2) as pool:
        for step in range(1, 10):
            gradient = draw(rng, size)
            cut_gradient = gradient.copy()
            run(case.rule, case.hyper_of(step), whole, gradient, state, step, 0.1)
            owns = [slice(*pair) for pair in itertools.pairwise(cuts)]
            done = [pool.submit(run_piece, own, cut_gradient, step) for own in owns]
            for future in done:
                future.result()
            same_states(pieces_state, state)
            if run is rules.update:
                same_bits(cut_gradient, gradient)
                whole += gradient
                np.copyto(pieces, whole)
            same_bits(pieces, whole)


def test_read_only_and_unaligned_vectors():
    rng = np.random.default_rng(0)
    params, gradient = draw(rng, 100), draw(rng, 100)
    expected = gradient.copy()
    rules.update(Rule("sgd"), [0.1, 0, 0, 0.5], params, expected, {}, 1)
    shifted = np.frombuffer(bytearray(b"-" + gradient.tobytes()), np.float32, offset=1)
    params.setflags(write=False)
    rules.update(Rule("sgd"), [0.1, 0, 0, 0.5], params, shifted, {}, 1)
    same_bits(shifted.copy(), expected)


def test_outer_nesterov_is_sgd_on_the_opposite_of_the_move():
    rng = np.random.default_rng(1)
    outer, inner = Rule("outer_nesterov"), Rule("sgd", momentum=True, nesterov=True)
    params = draw(rng, 100)
    other, state, other_state = params.copy(), new_state(outer, 100), new_state(inner, 100)
    for step in range(1, 20):
        move = draw(rng, 100)
        rules.apply(inner, [0.7, 0.9, 0, 0], other, -move, other_state, step, 0.5)
        rules.apply(outer, [0.7, 0.9], params, move, state, step, 0.5)
        same_bits(params, other)


def test_average_adds_the_move():
    params, move = draw(np.random.default_rng(1), 100), draw(np.random.default_rng(2), 100)
    expected = params + move * np.float32(1 / 3)
    rules.apply(Rule("average"), [], params, move, {}, 5, 1 / 3)
    same_bits(params, expected)


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9, 0.95, 0.999, 0.9999])
def test_bias_correction_is_exact_enough(beta):
    for step in [1, 2, 3, 10, 999, 1000, 1001]:
        exact = 1 - Fraction(beta) ** step
        # A power by squaring is wrong by `step` roundings, all of which count most for large powers:
        # step * beta**step / (1 - beta**step) is below beta / (1 - beta). One more is the subtraction's.
        limit = (beta / (1 - beta) + 1) * 2.0**-53 * 1.01
        assert abs(Fraction(1 - rules._power(beta, step)) / exact - 1) <= limit


@pytest.mark.parametrize("size", [0, 1, 1023, 1024, 1025, 5000])
@pytest.mark.parametrize("scale", [1.0, 1 / 3])
def test_sum_squares_adds_in_the_order_it_states(size, scale):
    vector = draw(np.random.default_rng(size), size)
    padded = np.zeros(-(-size // 1024) * 1024)
    padded[:size] = vector * np.float32(scale)
    sums = np.zeros(1024)
    for row in padded.reshape(-1, 1024):
        sums += row * row
    while sums.size > 1:
        sums = sums[: sums.size // 2] + sums[sums.size // 2 :]
    assert rules.sum_squares(vector, scale) == sums[0]
    assert rules.sum_squares(vector.copy(), scale) == sums[0]


def test_sum_squares_neither_overflows_nor_vanishes():
    huge = np.full(3, np.finfo(np.float32).max, np.float32)
    assert rules.sum_squares(huge) == 3 * float(huge[0]) ** 2
    assert rules.sum_squares(np.full(2, 2.0**-149, np.float32)) == 2.0**-297


def test_names():
    assert Rule("sgd").hyper_names == ("lr", "momentum", "dampening", "weight_decay")
    assert (
        Rule("adam").hyper_names
        == Rule("adamw").hyper_names
        == ("lr", "beta1", "beta2", "eps", "weight_decay")
    )
    assert Rule("average").hyper_names == Rule("average").state_names == Rule("sgd").state_names == ()
    assert Rule("outer_nesterov").hyper_names == ("lr", "momentum")
    assert Rule("sgd", momentum=True).state_names == Rule("outer_nesterov").state_names == ("momentum",)
    assert Rule("adamw").state_names == ("exp_avg", "exp_avg_sq")
    assert Rule("adam", amsgrad=True).state_names == ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")


def test_rules_travel_as_data():
    rule = Rule("sgd", momentum=True, nesterov=True)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(rule), type=Rule) == rule
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"kind": "sgd", "other": True}, Rule)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"kind": "lamb"}, Rule)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "lamb"}, "no update rule `lamb`"),
        ({"kind": "adam", "momentum": True}, "`adam` has no `momentum`"),
        ({"kind": "sgd", "amsgrad": True}, "`sgd` has no `amsgrad`"),
        ({"kind": "average", "maximize": True}, "`average` has no `maximize`"),
        ({"kind": "sgd", "nesterov": True}, "without `momentum`"),
    ],
)
def test_rules_that_make_no_sense_are_refused(arguments, message):
    with pytest.raises(RuleError, match=message):
        Rule(**arguments)


def read_only(size: int) -> Vector:
    vector = np.zeros(size, np.float32)
    vector.setflags(write=False)
    return vector


MOMENTUM = Rule("sgd", momentum=True)
WRONG = {
    "gradient's length": (
        {"gradient": np.zeros(3, np.float32)},
        "`gradient` has 3 values, but `params` has 4",
    ),
    "state's length": ({"state": {"momentum": np.zeros(5, np.float32)}}, "`momentum` has 5 values"),
    "missing state": ({"state": {}}, "state `momentum` .* is missing"),
    "float64 params": ({"params": np.zeros(4)}, "`params` is float64"),
    "float16 gradient": ({"gradient": np.zeros(4, np.float16)}, "`gradient` is float16"),
    "float64 state": ({"state": {"momentum": np.zeros(4)}}, "`momentum` is float64"),
    "other byte order": ({"gradient": np.zeros(4, ">f4")}, "`gradient` is >f4"),
    "a matrix": ({"params": np.zeros((2, 2), np.float32)}, r"shape \(2, 2\)"),
    "every other value": ({"gradient": np.zeros(8, np.float32)[::2]}, "contiguous"),
    "read-only state": ({"state": {"momentum": read_only(4)}}, "`momentum` is read-only"),
    "step 0": ({"step": 0}, "step 0"),
    "few hyperparameters": ({"hyper": [0.1, 0.9]}, "got 2 hyperparameters"),
    "infinite rate": ({"hyper": [np.inf, 0.9, 0, 0]}, "no finite float32"),
    "rate beyond float32": ({"hyper": [1e39, 0.9, 0, 0]}, "no finite float32"),
    "NaN decay": ({"hyper": [0.1, 0.9, 0, np.nan]}, "no finite float32"),
    "infinite scale": ({"scale": np.inf}, "no finite float32"),
    "momentum without a buffer": ({"rule": Rule("sgd"), "state": {}}, "keeps no momentum"),
    "beta1 of 1": ({"rule": Rule("adam"), "hyper": [0.1, 1.0, 0.9, 1e-8, 0]}, "`beta1` is 1.0"),
    "NaN beta2": ({"rule": Rule("adam"), "hyper": [0.1, 0.9, np.nan, 1e-8, 0]}, "`beta2` is nan"),
}


@pytest.mark.parametrize("run", [rules.update, rules.apply])
@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_refused_and_change_nothing(run, name):
    changed, message = WRONG[name]
    arguments: dict[str, Any] = {
        "rule": MOMENTUM,
        "hyper": [0.1, 0.9, 0, 0],
        "params": np.ones(4, np.float32),
        "gradient": np.ones(4, np.float32),
        "state": {kind: np.ones(4, np.float32) for kind in ("momentum", "exp_avg", "exp_avg_sq")},
        "step": 1,
    }
    arguments |= changed
    vectors = [arguments["params"], arguments["gradient"], *arguments["state"].values()]
    before = [vector.copy() for vector in vectors]
    with pytest.raises(RuleError, match=message):
        run(**arguments)
    for vector, copy in zip(vectors, before, strict=True):
        np.testing.assert_array_equal(vector, copy)


def test_read_only_targets_are_refused():
    ones = np.ones(4, np.float32)
    with pytest.raises(RuleError, match="`params` is read-only"):
        rules.apply(Rule("average"), [], read_only(4), ones, {}, 1)
    with pytest.raises(RuleError, match="`gradient` is read-only"):
        rules.update(Rule("average"), [], ones, read_only(4), {}, 1)
    with pytest.raises(RuleError, match="`vector` is float64"):
        rules.sum_squares(np.ones(3))
