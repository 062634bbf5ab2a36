"""What is kept on a GPU is what the CPU keeps, bit for bit, and nothing is lost."""

import numpy as np
import pytest
import torch

from shoestring.codec.base import Layout
from shoestring.codec.dct import Dct
from shoestring.codec.dct.gpu import GpuDct, GpuFeedback
from shoestring.codec.feedback import Feedback
from shoestring.errors import NonFiniteError
from tests.unit.codec.cases import for_each

LAYOUT = Layout.of([(2, 4, 3, 3), (10,), (9, 17)])
CPU = torch.device("cpu")


def gradient(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).laplace(size=LAYOUT.total).astype(np.float32)


def encode(feedback: GpuFeedback, codec: GpuDct, values: np.ndarray) -> np.ndarray:
    return feedback.encode_total(codec, torch.from_numpy(values) + feedback.waiting)


def decode(payload: np.ndarray) -> np.ndarray:
    values = np.empty(LAYOUT.total, np.float32)
    Dct().decode(payload, LAYOUT, values)
    return values


@for_each("transform", ["always", "never"])
def test_what_is_sent_and_what_is_kept_are_the_bits_of_the_cpu(transform):
    options = {"small": 16, "step": 2.0, "transform": transform}
    here, there = Feedback(Dct(**options), LAYOUT), GpuFeedback(LAYOUT, CPU)
    for step in range(2):
        want = decode(here.encode(gradient(step)))
        got = decode(encode(there, GpuDct(**options), gradient(step)))
        assert got.tobytes() == want.tobytes()
        assert there.kept.tobytes() == here.kept.tobytes()


def test_nothing_is_lost_over_several_pushes():
    codec, feedback = GpuDct(small=16, step=4.0), GpuFeedback(LAYOUT, CPU)
    for step in range(2):
        came_in = feedback.kept + gradient(step)
        sent = decode(encode(feedback, codec, gradient(step)))
        whole = sent.astype(np.float64) + feedback.kept
        assert (whole == sent + feedback.kept).all()
        assert np.abs(whole - came_in).max() <= np.abs(came_in).max() * 2.0**-16


def test_what_is_not_finite_is_refused_and_changes_nothing():
    codec, feedback = GpuDct(small=16), GpuFeedback(LAYOUT, CPU)
    encode(feedback, codec, gradient(0))
    kept = feedback.kept
    for bad in (np.nan, np.inf):
        values = gradient(1)
        values[80] = bad
        with pytest.raises(NonFiniteError, match="tensor 1"):
            encode(feedback, codec, values)
        assert feedback.kept.tobytes() == kept.tobytes()


def test_what_was_kept_moves_and_is_scaled_as_on_the_cpu():
    here = Feedback(Dct(small=16), LAYOUT)
    here.encode(gradient(0))
    there = GpuFeedback(LAYOUT, CPU, here.kept)
    assert there.kept.tobytes() == here.kept.tobytes()
    here.scale(0.3)
    there.scale(0.3)
    assert there.kept.tobytes() == here.kept.tobytes()
    back = Feedback(Dct(), LAYOUT)
    back.load({"kept": there.kept})
    assert back.kept.tobytes() == here.kept.tobytes()


def test_what_is_lent_are_the_bits_of_the_cpu():
    here, there = Feedback(Dct(), LAYOUT), GpuFeedback(LAYOUT, CPU, gradient(1))
    here.load({"kept": gradient(1)})
    want, got = gradient(2), torch.from_numpy(gradient(2))
    here.lend(want)
    there.lend(got)
    assert got.numpy().tobytes() == want.tobytes()
    assert there.kept.tobytes() == here.kept.tobytes()
