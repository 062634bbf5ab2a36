"""What is chosen for a bucket is what the same rules say in NumPy, tensor by tensor."""

import math

import numpy as np
import pytest

from shoestring.codec.base import Layout
from shoestring.codec.dct import format as fmt
from shoestring.codec.dct import stream
from shoestring.codec.dct.choice import (
    ADVANTAGE,
    CHUNK_OVERHEAD_BITS,
    FLAT_BITS,
    TOO_LARGE,
    TOO_LARGE_FOR_HALF,
    TOO_SMALL,
    Chunking,
    ask,
)
from shoestring.codec.dct.codec import Dct
from shoestring.codec.dct.options import Options
from shoestring.codec.dct.steps import MANTISSA, MAX_STEPS, ROUNDING, of_headers, steps_of_decoder
from shoestring.codec.rate import MARGINAL_GAIN
from tests.unit.codec.cases import for_each
from tests.unit.codec.dct.streams import decode

LAYOUT = Layout.of([(64, 3, 3, 3), (10,), (0,), (90, 170), (70,), (300,), (512,), (4, 64), (17, 17)])
OPTIONS = [
    {},
    {"bits": 0.1},
    {"bits": 1.0, "small": 32},
    {"bits": 0.001},
    {"bits": 30.0},
    {"step": 0.01, "transform": "always", "block": 16},
    {"bits": 2.0, "transform": "never", "small_as": "float32"},
    {"step": 900.0, "small": 0},
]
CHUNKING = Chunking(bits=2048, most_log2=16)
STEPS = np.exp2(np.arange(-10, 11) / 2)


def nearest(step: float) -> tuple[int, int]:
    """The mantissa and exponent of the nearest step that can be sent."""
    exponent = math.floor(math.log2(step)) - 4
    mantissa = int(np.rint(step / 2.0**exponent))
    return (16, exponent + 1) if mantissa == 32 else (mantissa, exponent)


def is_flat(size: int, energy: float, largest: float, relative: float) -> bool:
    """Say whether all magnitudes are so nearly the same that a step of the rms tells them well enough."""
    rms = math.sqrt(energy / size)
    mantissa, exponent = nearest(rms)
    allowed = relative**2 / 12
    spread, off = size * largest**2 / energy - 1, mantissa * 2.0**exponent / rms - 1
    return relative < 1 and off**2 <= allowed and spread <= allowed


def best_form(bits: np.ndarray, errors: np.ndarray, sides: list[int]) -> int:
    share = np.clip(bits.mean() / 6, 1e-6, 0.5)
    loss = (errors + MARGINAL_GAIN / (3 - np.log2(share)) * bits) * np.where(
        np.array(sides) > 1, ADVANTAGE, 1
    )
    return int(np.argmin(loss))


def kind_without_codes(options: Options, size: int, largest: float) -> int | None:
    small = size < max(options.small, 1)
    if largest < TOO_SMALL:
        return fmt.ZERO
    if largest > (TOO_LARGE_FOR_HALF if small else TOO_LARGE) or (small and options.small_as == "float32"):
        return fmt.FULL
    return fmt.HALF if small else None


def expected(options, energy, largest, step, costs_at):
    """The header fields of each tensor, as (kind, mantissa, exponent); `costs_at` gives a tensor's costs."""
    rows = []
    for index, size in enumerate(LAYOUT.sizes):
        kind = kind_without_codes(options, size, largest[index])
        if kind is not None:
            rows.append((kind, 0, math.frexp(largest[index])[1] - 15 if kind == fmt.HALF else 0))
            continue
        sides, bits, errors = costs_at(index)
        rms = math.sqrt(energy[index] / size)
        if sides[0] == 1 and is_flat(size, energy[index], largest[index], step):
            side, own_step = 1, rms
        else:
            side, own_step = sides[best_form(bits, errors, sides)], step * rms
        mantissa, exponent = nearest(max(own_step, largest[index] / MAX_STEPS))
        threshold = (1 - float(ROUNDING)) * mantissa * 2.0**exponent
        if side == 1 and largest[index] * (1 + 2.0**-10) < threshold:
            rows.append((fmt.ZERO, 0, 0))
        else:
            rows.append((fmt.kind_of_block(side), mantissa, exponent))
    return rows


def fields(headers: np.ndarray) -> list[tuple[int, int, int]]:
    return [(int(h["kind"]), int(h["mantissa"]), int(h["exponent"])) for h in headers]


@for_each("options", [Options(**chosen) for chosen in OPTIONS])
def test_headers_are_what_the_rules_say(options):
    question = ask(LAYOUT, options)
    rng = np.random.default_rng(3)
    for k in range(40):
        scale = 2.0 ** rng.integers(-120, 120) if rng.random() < 0.5 else 1.0
        some = (rng.random(len(LAYOUT.sizes)) < 0.8) & (np.array(LAYOUT.sizes) > 0)
        largest = scale * rng.exponential(size=some.size) * some
        evenness = rng.uniform(0.01, 0.2, some.size) if k % 2 else 1 - 0.03 * rng.random(some.size)
        energy = largest**2 * np.array(LAYOUT.sizes) * evenness
        falling = rng.uniform(0.5, 3, (len(question.wanted), 1)) * STEPS ** -rng.uniform(1, 2)
        costs = np.stack([falling, np.minimum(STEPS**-2.0, 0.08) + 0 * falling])
        step, at = options.step, 0
        if options.bits is None:
            costs = costs[..., :1]
        else:
            at = int(rng.integers(STEPS.size))
            step = float(STEPS[at])
        relative = STEPS if options.bits is not None else np.array([step])

        def costs_at(index, costs=costs, at=at):
            own = [s for s, (tensor, _) in enumerate(question.wanted) if tensor == index]
            return [question.wanted[s][1] for s in own], costs[0, own, at] + 1e-9, costs[1, own, at]

        headers, bits = question.answer(energy, largest, step, relative, costs, CHUNKING)
        assert fields(headers) == expected(options, energy, largest, step, costs_at)
        logs = headers["chunk_log2"][headers["mantissa"] > 0]
        assert ((logs >= fmt.MIN_CHUNK_LOG2) & (logs <= CHUNKING.most_log2)).all()
        floats = 16 * np.array(LAYOUT.sizes) @ (headers["kind"] == fmt.HALF)
        floats += 32 * np.array(LAYOUT.sizes) @ (headers["kind"] == fmt.FULL)
        assert bits >= floats


def test_a_budget_between_measured_steps_is_met():
    options = Options(bits=1.0, transform="never", small=0)
    layout = Layout.of([(1000,), (3000,)])
    question = ask(layout, options)
    energy, largest = np.array([1000.0, 3000.0]), np.array([4.0, 4.0])
    bits = np.stack([2 * STEPS**-1.0, STEPS**-1.5])
    costs = np.stack([bits, 0 * bits])
    budget, values = question.budget(largest, CHUNKING)
    assert values == 4000
    assert budget == pytest.approx(4000 / (1 + CHUNK_OVERHEAD_BITS / CHUNKING.bits))
    step, is_met = question.step_for_budget(energy, largest, budget, STEPS, costs)
    assert is_met
    total = 1000 * 2 / step + 3000 * step**-1.5
    assert total == pytest.approx(budget, rel=0.01)
    for k in (0, 7, 20):
        found = question.modelled_bits(energy, largest, float(STEPS[k]), costs[..., k])
        assert found == pytest.approx(1000 * bits[0, k] + 3000 * bits[1, k])
    assert not question.step_for_budget(energy, largest, 1e9, STEPS, costs)[1]
    assert not question.step_for_budget(energy, largest, -1.0, STEPS, costs)[1]


@for_each("bits", [1.5, 2.0, 4.0, 8.0])
@for_each("magnitude", [1.0, 0.375, 2.0**-30])
def test_values_of_one_magnitude_take_a_bit_each(bits, magnitude):
    """Their step is the magnitude: finer ones would say nothing more."""
    layout = Layout.of([(100_000,)])
    signs = np.random.default_rng(5).choice(np.array([-1, 1], np.float32), layout.total)
    values = signs * np.float32(magnitude)
    for transform in ("never", "auto"):
        payload = Dct(bits=bits, transform=transform).encode(values, layout)
        assert 8 * payload.size / layout.total < 1.05
        np.testing.assert_array_equal(decode("numba", payload, layout), values)


def test_a_magnitude_that_no_step_fits_is_told_as_finely_as_was_asked():
    layout = Layout.of([(50_000,)])
    values = np.random.default_rng(6).choice(np.array([-1, 1], np.float32), layout.total) * np.float32(1.03)
    sizes = []
    for step in (0.5, 0.01):
        payload = Dct(step=step, transform="never").encode(values, layout)
        error = np.square(decode("numba", payload, layout) - values).mean()
        assert error <= (21 / 32 * 1.03 * step) ** 2  # the widest dead zone of a step
        sizes.append(payload.size)
    assert sizes[0] < sizes[1] / 2
    assert 8 * sizes[0] / layout.total < FLAT_BITS + 0.02


@for_each("backend", ["numba", "numpy"])
def test_a_tensor_without_codes_is_a_header(backend):
    layout = Layout.of([(70_000,), (300,)])
    values = np.ones(layout.total, np.float32)
    values[-300:] *= np.arange(300) % 7
    left_over = np.full_like(values, np.nan)
    payload = Dct(step=2.0, transform="never", backend=backend).encode(values, layout, left_over)
    headers = stream.parse(payload, layout).headers
    assert headers["kind"].tolist() == [fmt.ZERO, fmt.kind_of_block(1)]
    sent = decode(backend, payload, layout)
    np.testing.assert_array_equal(sent.astype(np.float64) + left_over, values)


def test_steps_are_derived_alike_with_and_without_the_largest():
    headers = np.zeros(3, fmt.TENSOR)
    headers["mantissa"], headers["exponent"] = [16, 23, 31], [-100, 5, 100]
    with_largest = of_headers(headers, np.array([1e-30, 100.0, 1e30]))
    without = np.zeros_like(with_largest)
    steps_of_decoder(headers.view(np.uint8).reshape(-1, 4), without)
    columns = [k for k in range(5) if k != 2]
    np.testing.assert_array_equal(with_largest[:, columns], without[:, columns])
    np.testing.assert_array_equal(without[:, MANTISSA], [16, 23, 31])
