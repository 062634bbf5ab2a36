"""The rules walk where torch's optimizers walk, within float32 rounding."""

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from shoestring.codec.base import Vector
from shoestring.server import rules
from tests.unit.server.rule_cases import TORCH_CASES, Case, new_state, sgd

Slope = Callable[[Vector, int], np.ndarray]  # the gradient at some parameters in some step
ROUNDING = 2.0**-24  # the most a float32 operation is wrong, relative to its result


# Gradients: random ones that do not ask where the parameters are, and two losses that do, so that
# a difference in parameters comes back as one in gradients.


def fixed_gradients(rng: np.random.Generator, size: int) -> Slope:
    drawn = rng.standard_normal((64, size)) * 10.0 ** rng.uniform(-3, 0, size)
    return lambda params, step: drawn[step % 64]


def quadratic(rng: np.random.Generator, size: int) -> Slope:
    curvature, lowest = 10.0 ** rng.uniform(-2, 0, size), rng.standard_normal(size)
    return lambda params, step: curvature * (params - lowest)


def logistic(rng: np.random.Generator, size: int) -> Slope:
    inputs, labels = rng.standard_normal((32, size)), rng.integers(0, 2, 32)

    def slope(params: Vector, step: int) -> np.ndarray:
        chances = 1 / (1 + np.exp(-(inputs @ params.astype(np.float64))))
        return inputs.T @ (chances - labels) / 32 + 1e-2 * params

    return slope


# One tensor each, all in one run, as a rule takes every value for itself.
PROBLEMS = [
    (fixed_gradients, (13, 9)),
    (fixed_gradients, ()),
    (quadratic, (5, 4, 3)),
    (quadratic, (65,)),
    (logistic, (7, 5)),
    (logistic, (20,)),
]
CUTS = np.cumsum([0, *(math.prod(shape) for _, shape in PROBLEMS)]).tolist()
PARTS = [slice(*pair) for pair in itertools.pairwise(CUTS)]


def make_torch(case: Case, parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    hyper = dict(case.hyper)
    if case.rule.kind == "sgd":
        return torch.optim.SGD(parameters, **hyper, nesterov=case.rule.nesterov, maximize=case.rule.maximize)
    betas = (hyper.pop("beta1"), hyper.pop("beta2"))
    kind = torch.optim.Adam if case.rule.kind == "adam" else torch.optim.AdamW
    return kind(parameters, **hyper, betas=betas, foreach=False, **case.flags)


def check_paths(case: Case, found: np.ndarray, expected: np.ndarray, where: str) -> None:
    """Hold the parameters after each step, by row, against torch's.

    Both work out the same formula with other roundings (torch may fuse a multiply and an add,
    and rounds AdamW's 1 - lr * decay to a float32), so in one step each is wrong by at most

    - 2 roundings of a parameter, |p| <= `far`: the addition, and AdamW's scaling;
    - 8 roundings of an update, |u| <= `fast`: no rule has more operations in a row;
    - Adam divides by a running sum of squares. Its relative error grows by 2 roundings a
      step and is forgotten at the rate 1 - beta2; the root halves it.

    A running average answers an error of 1 by errors that sum up to at most 1 / (1 - momentum).
    The losses are convex and the rates below their limits of stability, so what a gradient makes of
    an error does not add to that. Both are wrong (factor 2), in every step so far.
    """
    expected = expected.astype(np.float64)
    far, fast = np.abs(expected).max(), np.abs(np.diff(expected, axis=0)).max()
    memory = 1 / (1 - case.hyper["beta2"]) if "beta2" in case.hyper else 0.0
    gain = 1 / (1 - case.hyper.get("momentum", case.hyper.get("beta1", 0.0)))
    steps = np.arange(len(expected))
    limits = 2 * ROUNDING * steps * gain * (2 * far + (8 + np.minimum(steps, memory)) * fast)
    differences = np.abs(found - expected).max(axis=1)
    assert far > 0
    assert fast > 0
    assert (differences <= limits).all(), f"{where}: step {np.argmax(differences > limits)}"


@pytest.mark.parametrize("name", TORCH_CASES)
def test_rules_follow_torch_for_1000_steps(name):
    case = TORCH_CASES[name]
    rng = np.random.default_rng(len(name))
    slopes = [problem(rng, math.prod(shape)) for problem, shape in PROBLEMS]
    sign = -1 if case.rule.maximize else 1  # so that the losses are still walked down

    def gradient_at(params: Vector, step: int) -> Vector:
        found = [slope(params[part], step) for slope, part in zip(slopes, PARTS, strict=True)]
        return (sign * np.concatenate(found)).astype(np.float32)

    params = rng.standard_normal(CUTS[-1]).astype(np.float32)
    state = new_state(case.rule, params.size)
    shared = torch.from_numpy(params.copy())
    tensors = [shared[part].view(shape) for part, (_, shape) in zip(PARTS, PROBLEMS, strict=True)]
    optimizer = make_torch(case, tensors)
    expected, found = [params.copy()], [params.copy()]
    for step in range(1, 1001):
        hyper = case.hyper_of(step)
        optimizer.param_groups[0]["lr"] = hyper[0]
        gradient = torch.from_numpy(gradient_at(shared.numpy(), step))
        for tensor, part in zip(tensors, PARTS, strict=True):
            tensor.grad = gradient[part].view(tensor.shape)
        optimizer.step()
        rules.apply(case.rule, hyper, params, gradient_at(params, step), state, step)
        expected.append(shared.numpy().copy())
        found.append(params.copy())
    for (problem, shape), part in zip(PROBLEMS, PARTS, strict=True):
        check_paths(
            case, np.array(found)[:, part], np.array(expected)[:, part], f"{problem.__name__} {shape}"
        )


def test_momentum_that_is_off_for_a_while_follows_torch():
    case = sgd(momentum=0.9)
    rng = np.random.default_rng(3)
    params, state = rng.standard_normal(100).astype(np.float32), new_state(case.rule, 100)
    shared = torch.from_numpy(params.copy())
    optimizer = torch.optim.SGD([shared], lr=0.1, momentum=0.9)
    expected, found = [params.copy()], [params.copy()]
    for step in range(1, 40):
        momentum = 0.0 if 10 <= step < 20 else 0.9
        optimizer.param_groups[0]["momentum"] = momentum
        gradient = rng.standard_normal(100).astype(np.float32)
        shared.grad = torch.from_numpy(gradient.copy())
        optimizer.step()
        rules.apply(case.rule, [0.1, momentum, 0, 0], params, gradient, state, step)
        expected.append(shared.numpy().copy())
        found.append(params.copy())
    check_paths(case, np.array(found), np.array(expected), "momentum off")
