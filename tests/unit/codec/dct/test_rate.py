"""Budgets are met, and equal steps are the best use of one."""

import math

import numpy as np
import pytest

from shoestring.codec.base import Layout
from shoestring.codec.dct.codec import Dct
from shoestring.codec.rate import HIGHEST_STEP, LOWEST_STEP, common_step
from tests.unit.codec.cases import for_each
from tests.unit.codec.dct.streams import decode

MODELS = {
    "power": lambda step: 1000 * step**-1.3,
    "high rate": lambda step: 1000 * math.log2(1 + (4 / step) ** 2),
    "exponential": lambda step: 5000 * math.exp(-step),
    "stairs": lambda step: 1000 * 2.0 ** -math.floor(8 * math.log2(step)) / 8,
}


@for_each("budget", [5.0, 50.0, 500.0, 4000.0])
@for_each("kind", MODELS)
def test_common_step_meets_the_budget(kind, budget):
    """Within 3 %, or where the model jumps past the budget, at the jump."""
    model = MODELS[kind]
    step = common_step(model, budget_bits=budget, values=1000)
    assert model(step * 1.02) <= budget * 1.03
    assert model(step / 1.02) >= budget / 1.03


def test_common_step_looks_few_times():
    looks = []
    common_step(lambda step: looks.append(step) or 100 * step**-1.2, budget_bits=1000, values=1000)
    assert len(looks) <= 16


@for_each("budget", [0.0, -1.0, 1e-12])
def test_no_budget_gives_the_highest_step(budget):
    assert common_step(lambda step: 100 / step, budget_bits=budget, values=1000) == HIGHEST_STEP


def test_budget_beyond_reach_gives_the_lowest_step():
    assert common_step(lambda step: 100 / step, budget_bits=1e9, values=1000) == LOWEST_STEP


SHAPES = [
    (256, 128, 3, 3),
    (1000, 400),
    (2000,),
    (64,),
    (512,),
    (128, 128, 3, 3),
    (512, 300),
    (128, 40, 5, 5),
]


def clustered(layout: Layout, rng: np.random.Generator) -> np.ndarray:
    """Rows of unequal scale: codes come in clusters, as those of gradients do."""
    tensors = []
    for size in layout.sizes:
        rows = np.exp(0.7 * rng.standard_normal(-(-size // 50)))
        tensors.append(np.repeat(rows, 50)[:size] * rng.laplace(0, 1, size))
    return np.concatenate(tensors)


BUCKETS = {
    "gaussian": lambda layout, rng: rng.standard_normal(layout.total),
    "laplace": lambda layout, rng: rng.laplace(0, 1, layout.total),
    "clustered": clustered,
}


@for_each("bits", [0.5, 1.0, 2.0, 4.0])
@for_each("kind", BUCKETS)
def test_budget_is_met_within_ten_per_cent(kind, bits):
    layout = Layout.of(SHAPES)
    rng = np.random.default_rng(23)
    scale = np.repeat(10.0 ** rng.uniform(-6, 0, len(layout.sizes)), layout.sizes)
    values = (scale * BUCKETS[kind](layout, rng)).astype(np.float32)
    payload = Dct(bits=bits).encode(values, layout)
    assert 8 * payload.size / layout.total == pytest.approx(bits, rel=0.1)


@for_each("kind", BUCKETS)
def test_small_tensors_count_in_the_budget(kind):
    """Half of the values are sent as float16; the budget is that of all of them."""
    layout = Layout.of([(200,)] * 500 + [(100_000,)])
    values = BUCKETS[kind](layout, np.random.default_rng(3)).astype(np.float32)
    payload = Dct(backend="numpy", bits=9.0).encode(values, layout)
    assert 8 * payload.size / layout.total == pytest.approx(9.0, rel=0.1)


def curve(values: np.ndarray, steps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Bytes and squared error of a tensor of unit rms at each step."""
    layout = Layout.of([values.shape])
    sizes, errors = [], []
    for step in steps.tolist():
        payload = Dct(step=step, transform="never").encode(values, layout)
        sizes.append(payload.size)
        errors.append(float(np.square(decode("numba", payload, layout).astype(np.float64) - values).sum()))
    return np.array(sizes, np.float64), np.array(errors)


@for_each("center", [0.5, 1.0, 2.0])
def test_unequal_steps_are_no_better(center):
    """At the same total size, moving bits from one tensor to the other gains at most 1 %."""
    rng = np.random.default_rng(29)
    octave = np.arange(16, 32) / 16  # every step that can be sent
    steps = center * np.concatenate([octave / 2, octave])
    first = rng.standard_normal(60_000)
    second = rng.laplace(0, 1, 60_000)
    curves = []
    for tensor in (first, second):
        unit = (tensor / np.sqrt(np.square(tensor).mean())).astype(np.float32)
        curves.append(curve(unit, steps))
    (size_a, error_a), (size_b, error_b) = curves
    at = int(np.argmin(np.abs(steps - center)))
    total_size, total_error = size_a[at] + size_b[at], error_a[at] + error_b[at]
    for i, step in enumerate(steps):
        wanted = total_size - size_a[i]
        if size_b[-1] <= wanted <= size_b[0]:
            partner = np.interp(wanted, size_b[::-1], error_b[::-1])
            assert error_a[i] + partner > 0.99 * total_error, step


def test_a_cliff_in_the_rate_is_found():
    def bits(step: float) -> float:
        return max(1000 * (3 - math.log2(step)), 1e-3)

    assert bits(common_step(bits, budget_bits=50.0, values=1000)) == pytest.approx(50.0, rel=0.02)
