"""A comparison with DDP passes only where something was compared."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from benchmarks.compatibility.case import Case
from benchmarks.compatibility.compare import Reference, judge
from benchmarks.compatibility.outcome import Error, Facts, Outcome, flatten

CASE = Case("a script", "models", lambda world: {})
LOSSES = ([4.0, 3.0, 2.0, 1.0], [4.5, 3.5, 2.5, 1.5])
UNIT = 2.0**-24


def outcome(rank, weights=(0.5, -0.25), losses=None, moved=0.5, **values):
    own = {"shared.model.weight": torch.tensor(weights), "first.model.mean": torch.tensor([1.0 + rank])}
    own |= {"state.optimizer.state.0.step": torch.tensor(4.0)}
    own |= {name.replace("__", "."): value for name, value in values.items()}
    return Outcome(Facts(losses or LOSSES[rank], moved), own)


def pair(**more):
    return outcome(0, **more), outcome(1, **more)


def failed(**error):
    return Outcome(Facts(error=Error(**error)))


def reference(**more):
    shaken = pair(weights=(0.5 + UNIT, -0.25))
    return replace(Reference(pair(), shaken), **more)


def result(ours, mode="wrap-model", codec="float32", case=CASE, **more):
    return judge(case, mode, codec, reference(**more), ours)


def nudged(values, steps=1):
    moved = torch.tensor(values)
    for _ in range(steps):
        moved = torch.nextafter(moved, torch.tensor(math.inf))
    return tuple(moved.tolist())


def test_the_same_is_equal():
    row = result(pair())
    assert (row.result, row.difference, row.message) == ("equal", 0.0, "")


def test_one_bit_is_a_difference():
    row = result(pair(weights=nudged((0.5, -0.25))))
    assert row.result == "wrong"
    assert "`shared.model.weight` differs from DDP's by 5.96e-08" in row.message


def test_the_sign_of_a_zero_is_a_difference():
    plain = pair(weights=(0.0, 1.0))
    assert result(pair(weights=(0.0, 1.0)), plain=plain).result == "equal"
    assert result(pair(weights=(-0.0, 1.0)), plain=plain).result == "wrong"


def test_nan_equals_nan_and_nothing_else():
    plain = pair(weights=(math.nan, 1.0))
    assert result(pair(weights=(math.nan, 1.0)), plain=plain).result == "equal"
    assert result(pair(weights=(0.5, 1.0)), plain=plain).result == "wrong"
    assert result(pair(weights=(1.0, math.nan)), plain=plain).result == "wrong"


@pytest.mark.parametrize("mode", ["wrap-model", "wrap-optimizer", "local"])
@pytest.mark.parametrize("codec", ["float32", "dct"])
def test_workers_must_hold_the_same_bits_in_every_mode(mode, codec):
    apart = (outcome(0), outcome(1, weights=nudged((0.5, -0.25))))
    row = result(apart, mode, codec)
    assert row.result == "wrong"
    assert "workers differ in `shared.model.weight`" in row.message


@pytest.mark.parametrize("mode", ["wrap-model", "wrap-optimizer"])
def test_state_that_is_missing_is_a_difference(mode):
    ours = pair()
    for one in ours:
        del one.values["state.optimizer.state.0.step"]
    row = result(ours, mode)
    assert row.result == "wrong"
    assert "`state.optimizer.state.0.step` is there with DDP but not" in row.message
    assert result(pair(state__optimizer__more=torch.ones(1)), mode).result == "wrong"


def test_buffers_are_compared_on_the_first_worker_alone():
    there = outcome(0), outcome(1, first__model__mean=torch.tensor([9.0]))
    assert result(there).result == "equal"
    here = outcome(0, first__model__mean=torch.tensor([9.0])), outcome(1)
    assert result(here).result == "wrong"


def test_another_type_or_shape_is_a_difference():
    for other in (torch.tensor([0.5, -0.25], dtype=torch.float64), torch.tensor([[0.5, -0.25]])):
        assert result(pair(shared__model__weight=other)).result == "wrong"


def test_losses_are_compared():
    other = (outcome(0, losses=[4.0, 3.0, 2.0, 1.0 + 1e-6]), outcome(1))
    assert "the loss of step 4" in result(other).message
    fewer = (outcome(0, losses=[4.0, 3.0, 2.0]), outcome(1))
    assert "took 3 steps" in result(fewer).message


def test_rules_on_shards_may_differ_by_what_shaking_makes():
    # Shaken by 1 u: 4.47 of that, and 2 u of the largest value.
    assert result(pair(weights=(0.5 + 5 * UNIT, -0.25)), "wrap-optimizer").result == "equal"
    row = result(pair(weights=(0.5 + 6 * UNIT, -0.25)), "wrap-optimizer")
    assert row.result == "wrong"
    assert "more than" in row.message


def test_a_tolerance_as_wide_as_the_way_is_none():
    wide = {"shaken": pair(weights=(0.501, -0.25))}
    row = result(pair(weights=nudged((0.5, -0.25))), "wrap-optimizer", **wide)
    assert row.result == "wrong"
    assert "tolerance" in row.message
    assert result(pair(), "wrap-optimizer", **wide).result == "equal"  # the same bits need none


def test_counts_have_no_tolerance():
    ours = pair(state__optimizer__state__0__step=torch.tensor(5.0))
    assert result(ours, "wrap-optimizer").result == "wrong"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"plain": (outcome(0), outcome(1, losses=LOSSES[0]))}, "the same data"),
        ({"plain": pair(moved=0.0)}, "did not move"),
        ({"plain": (outcome(0), outcome(1, weights=(0.5, 0.25)))}, "DDP: workers differ"),
        ({"plain": (outcome(0), None)}, "without a word"),
        ({"plain": (outcome(0), failed(kind="ValueError", message="no"))}, "DDP: ValueError: no"),
        ({"shaken": (outcome(0), failed(kind="ValueError", message="no"))}, "DDP: ValueError: no"),
        ({"plain": (outcome(0, losses=[2.0, 2.0]), outcome(1, losses=[2.0, 2.1]))}, "losses went"),
    ],
)
def test_a_reference_that_shows_nothing_is_wrong(more, said):
    plain = more.get("plain", pair())
    row = result(plain, **more)
    assert row.result == "wrong"
    assert said in row.message


def test_a_script_that_returns_no_model_shows_nothing():
    bare = tuple(Outcome(one.facts, {"own.x": torch.ones(1)}) for one in pair())
    assert "no model" in result(bare, plain=bare, shaken=bare).message


def refusal(**more):
    return failed(
        **{"kind": "UsageError", "message": "no such", "hint": "do this", "is_refusal": True} | more
    )


def test_a_refusal_has_a_hint():
    row = result((refusal(), refusal()))
    assert (row.result, row.message) == ("refused", "no such (hint: do this)")
    assert result((refusal(), None)).result == "refused"  # the other is ended with the run


@pytest.mark.parametrize("kind", ["Hang", "Crash", "RuntimeError"])
def test_any_other_error_is_wrong(kind):
    other = failed(kind=kind, message="oh")
    for ours in ((other, other), (refusal(), other), (other, None), (outcome(0), other)):
        row = result(ours)
        assert row.result == "wrong"
        assert row.message.startswith(f"{kind}: oh")


def test_a_worker_that_ends_without_a_word_is_wrong():
    assert result((outcome(0), None)).result == "wrong"


@pytest.mark.parametrize(("mode", "codec"), [("local", "float32"), ("wrap-model", "dct")])
def test_other_trainings_must_train(mode, codec):
    other = {"weights": (0.75, 0.5)}
    row = result(pair(**other), mode, codec)
    assert (row.result, row.difference) == ("trains", 0.0)
    assert "did not move" in result(pair(**other, moved=0.0), mode, codec).message
    assert "not finite" in result(pair(weights=(math.inf, 0.5)), mode, codec).message
    still = tuple(outcome(rank, losses=[4.0, 4.0, 4.0, 3.9]) for rank in range(2))
    assert "losses went from" in result(still, mode, codec).message
    lost = tuple(outcome(rank, losses=[4.0, None, None, None]) for rank in range(2))
    assert "losses went from" in result(lost, mode, codec).message


def test_a_mode_without_ddps_result_is_said_in_the_case():
    masters = replace(CASE, trains={"wrap-optimizer": "why"})
    assert result(pair(weights=(0.75, 0.5)), "wrap-optimizer", case=masters).result == "trains"
    assert result(pair(weights=(0.75, 0.5)), "wrap-model", case=masters).result == "wrong"


def test_what_a_script_returns_is_named_by_kind():
    model = nn.Sequential(nn.Linear(2, 1), nn.BatchNorm1d(1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model(torch.ones(3, 2)).sum().backward()
    optimizer.step()
    found = flatten({"net": model, "sgd": optimizer, "seen": [1.0, torch.ones(2)], "shared.score": 3})
    kinds = {name.partition(".")[0] for name in found}
    assert kinds == {"shared", "first", "state", "own"}
    assert {"shared.net.0.weight", "first.net.1.running_mean", "own.seen.1", "shared.score"} <= found.keys()
    assert {"state.sgd.state.0.momentum_buffer", "state.sgd.param_groups.0.lr"} <= found.keys()


def test_an_outcome_is_read_as_it_was_written(tmp_path):
    assert Outcome.read(tmp_path / "worker-0") is None
    told = Outcome(Facts([1.0, math.nan], 0.5), {"shared.a": torch.ones(2, dtype=torch.bfloat16)})
    told.write(tmp_path / "worker-0")
    again = Outcome.read(tmp_path / "worker-0")
    assert again.facts == Facts([1.0, None], 0.5)
    assert torch.equal(again.values["shared.a"], told.values["shared.a"])
