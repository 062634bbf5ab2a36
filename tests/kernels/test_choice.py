"""What is chosen for a GPU is what `plan` chooses."""

import numpy as np
import pytest

from shoestring.codec.base import Layout
from shoestring.codec.dct.gpu.choice import CHUNK_BITS, STEP_COLUMNS, answer, ask, find_steps
from shoestring.codec.dct.gpu.sample import step_ranges
from shoestring.codec.dct.options import Options
from shoestring.codec.dct.plan import plan
from shoestring.codec.dct.steps import of_headers

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


class Curves:
    """Costs of samples at some steps, as `plan` asks for them."""

    def __init__(self, relative: np.ndarray, costs: np.ndarray) -> None:
        self._at, self._bits, self._errors = np.log2(relative), np.log2(costs[0] + 1e-9), costs[1]

    def table(self):
        return np.exp2(self._at), np.exp2(self._bits), self._errors

    def costs(self, relative_step):
        place = np.interp(np.log2(relative_step), self._at, np.arange(self._at.size))
        left = min(int(place), max(self._at.size - 2, 0))
        right, share = min(left + 1, self._at.size - 1), place - left
        bits = self._bits[:, left] * (1 - share) + self._bits[:, right] * share
        return np.exp2(bits), self._errors[:, left] * (1 - share) + self._errors[:, right] * share


@pytest.mark.parametrize("options", [Options(**chosen) for chosen in OPTIONS], ids=str)
def test_headers_and_steps_are_those_of_the_plan(options):
    question, relative = ask(LAYOUT, options), np.array(step_ranges(options)[-1])
    rng = np.random.default_rng(3)
    for _ in range(20):
        scale = 2.0 ** rng.integers(-120, 120) if rng.random() < 0.5 else 1.0
        some = (rng.random(len(LAYOUT.sizes)) < 0.8) & (np.array(LAYOUT.sizes) > 0)
        largest = scale * rng.exponential(size=some.size) * some
        energy = largest**2 * np.array(LAYOUT.sizes) * rng.uniform(0.01, 0.2, some.size)
        falling = rng.uniform(0.5, 3, (len(question.wanted), 1)) * relative ** -rng.uniform(1, 2)
        costs = np.stack([falling, np.minimum(relative**-2.0, 0.08) + 0 * falling])

        def curves(chosen, _, costs=costs):
            return Curves(relative, costs[:, [question.wanted.index(pair) for pair in chosen]])

        want, _ = plan(LAYOUT, options, energy, largest, curves, CHUNK_BITS)
        got, _, is_met = answer(question, options, energy, largest, relative, costs)
        for field in ("kind", "mantissa", "exponent"):  # the size of chunks is chosen more carefully
            assert got[field].tolist() == want[field].tolist()
        if is_met and options.bits is not None:
            close = step_ranges(options)[0]
            few = slice(np.searchsorted(relative, close[0]), np.searchsorted(relative, close[-1]) + 1)
            near, _, is_near = answer(question, options, energy, largest, relative[few], costs[:, :, few])
            assert not is_near or near.tolist() == got.tolist()

        for known in (largest, None):
            steps = np.zeros((largest.size, STEP_COLUMNS), np.float32)
            find_steps(got, known, steps)
            for column, wanted in enumerate(of_headers(got, known).arrays):
                assert steps[:, column].tolist() == wanted.tolist()
