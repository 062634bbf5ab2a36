"""Feedback loses nothing: what is sent plus what is kept equals what came in."""

import numpy as np
import pytest

from shoestring.codec import registry
from shoestring.codec.base import Codec, Layout
from shoestring.codec.feedback import Feedback
from shoestring.codec.plain.base import PlainCodec
from shoestring.errors import CodecError, NonFiniteError
from tests.unit.codec.cases import BUCKETS, for_each

LAYOUT = Layout.of([(24, 16), (0,), (70,), (), (3, 3, 9)])
STEPS = 12
CODECS = [registry.make(name) for name in registry.names()]


def gradients(steps: int, seed: int = 0, layout: Layout = LAYOUT) -> list[np.ndarray]:
    """Gradients whose size differs between tensors and steps, as in training."""
    rng = np.random.default_rng(seed)
    scale = np.repeat(10.0 ** rng.uniform(-6, 1, len(layout.sizes)), layout.sizes)
    draw = [rng.standard_normal(layout.total) * 10.0 ** rng.uniform(-2, 2) for _ in range(steps)]
    return [(scale * values).astype(np.float32) for values in draw]


def decode(codec: Codec, payload: np.ndarray, layout: Layout = LAYOUT) -> np.ndarray:
    out = np.full(layout.total, np.nan, np.float32)
    codec.decode(payload, layout, out)
    return out


@for_each("codec", CODECS)
def test_sent_plus_kept_has_no_rounding(codec, same_bits):
    feedback = Feedback(codec, LAYOUT)
    for gradient in gradients(STEPS):
        came_in = feedback.kept + gradient
        sent = decode(codec, feedback.encode(gradient))
        exact = sent.astype(np.float64) + feedback.kept.astype(np.float64)
        np.testing.assert_array_equal(exact, sent + feedback.kept)  # the float32 sum did not round
        if isinstance(codec, PlainCodec):
            same_bits(sent + feedback.kept, came_in)


@for_each("bucket", BUCKETS)
@for_each("codec", CODECS)
def test_sent_plus_kept_on_hard_values(codec, bucket, same_bits):
    feedback = Feedback(codec, bucket.layout)
    for gradient in (bucket.values, bucket.values / np.float32(-3), np.zeros_like(bucket.values)):
        came_in = feedback.kept + gradient
        sent = decode(codec, feedback.encode(gradient), bucket.layout)
        exact = sent.astype(np.float64) + feedback.kept.astype(np.float64)
        np.testing.assert_array_equal(exact, (sent + feedback.kept).astype(np.float64))
        if isinstance(codec, PlainCodec):
            same_bits(sent + feedback.kept, came_in)


@for_each("name", ["float32", "float16", "bfloat16", "int8", "topk:ratio=0.1"])
def test_all_that_went_in_comes_out(name):
    """Integers below 2**24 add up without rounding, so the account over all steps is exact."""
    codec, rng = registry.make(name), np.random.default_rng(7)
    feedback = Feedback(codec, LAYOUT)
    went_in, came_out = np.zeros(LAYOUT.total), np.zeros(LAYOUT.total)
    for _ in range(STEPS):
        gradient = rng.integers(-100_000, 100_001, LAYOUT.total).astype(np.float32)
        went_in += gradient
        came_out += decode(codec, feedback.encode(gradient))
    np.testing.assert_array_equal(came_out + feedback.kept, went_in)


@for_each("codec", CODECS)
@for_each("bad", [np.nan, np.inf, -np.inf])
@for_each("place", [0, 383, 384, 453, 454, 455, LAYOUT.total - 1])
def test_non_finite_leaves_kept_as_it_was(codec, bad, place, same_bits):
    feedback = Feedback(codec, LAYOUT)
    first, second, third = gradients(3, seed=place)
    feedback.encode(first)
    before = feedback.kept.copy()
    second[place] = bad
    with pytest.raises(NonFiniteError, match="NaN or infinity"):
        feedback.encode(second)
    same_bits(feedback.kept, before)
    unhurt = Feedback(codec, LAYOUT)
    unhurt.load({"kept": before})
    assert feedback.encode(third).tobytes() == unhurt.encode(third).tobytes()


def test_overflow_of_the_sum_is_refused():
    feedback = Feedback(registry.make("topk"), Layout.of([(2,)]))
    huge = np.full(2, 3e38, np.float32)
    feedback.encode(huge)  # sends one of two equals, keeps the other
    before = feedback.kept.copy()
    with pytest.raises(NonFiniteError):
        feedback.encode(huge)
    np.testing.assert_array_equal(feedback.kept, before)


def test_failure_after_writing_kept_leaves_kept_as_it_was(same_bits, monkeypatch):
    feedback = Feedback(registry.make("int8"), LAYOUT)
    first, second = gradients(2)
    feedback.encode(first)
    before = feedback.kept.copy()

    def fail(values, layout, kept):
        kept[:] = 1.0
        raise MemoryError

    monkeypatch.setattr(feedback.codec, "_encode", fail)
    with pytest.raises(MemoryError):
        feedback.encode(second)
    same_bits(feedback.kept, before)


@for_each(
    "gradient", [np.zeros(1, np.float32), np.zeros(LAYOUT.total), np.zeros((1, LAYOUT.total), np.float32)]
)
def test_gradient_that_does_not_fit_is_refused(gradient):
    with pytest.raises(CodecError, match="`gradient`"):
        Feedback(registry.make("int8"), LAYOUT).encode(gradient)


@for_each("codec", CODECS)
def test_kept_is_read_only_and_a_snapshot(codec, same_bits):
    feedback = Feedback(codec, LAYOUT)
    first, second = gradients(2)
    feedback.encode(first)
    view = feedback.kept
    copy = view.copy()
    feedback.encode(second)
    same_bits(view, copy)
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1.0


@for_each("codec", CODECS)
def test_reset_forgets_what_was_kept(codec):
    feedback, fresh = Feedback(codec, LAYOUT), Feedback(codec, LAYOUT)
    first, second = gradients(2)
    feedback.encode(first)
    feedback.reset()
    assert not feedback.kept.any()
    assert feedback.encode(second).tobytes() == fresh.encode(second).tobytes()


@for_each("codec", CODECS)
def test_restored_feedback_continues_bit_for_bit(codec, same_bits):
    feedback, restored = Feedback(codec, LAYOUT), Feedback(codec, LAYOUT)
    steps = gradients(STEPS)
    for gradient in steps[: STEPS // 2]:
        feedback.encode(gradient)
    state = feedback.state()
    restored.load(state)
    state["kept"][:] = np.nan  # a copy on both sides
    for gradient in steps[STEPS // 2 :]:
        assert feedback.encode(gradient).tobytes() == restored.encode(gradient).tobytes()
        same_bits(feedback.kept, restored.kept)


@for_each(
    ("state", "error", "message"),
    [
        ({}, CodecError, "expected `kept`"),
        ({"kept": np.zeros(LAYOUT.total, np.float32), "extra": np.zeros(1)}, CodecError, "extra"),
        ({"kept": np.zeros(LAYOUT.total + 1, np.float32)}, CodecError, "values, but the layout"),
        ({"kept": np.zeros(LAYOUT.total)}, CodecError, "float64"),
        ({"kept": np.zeros((1, LAYOUT.total), np.float32)}, CodecError, "shape"),
        ({"kept": np.full(LAYOUT.total, np.nan, np.float32)}, NonFiniteError, "NaN or infinity"),
    ],
)
def test_state_that_does_not_fit_changes_nothing(state, error, message, same_bits):
    feedback = Feedback(registry.make("int8"), LAYOUT)
    feedback.encode(gradients(1)[0])
    before = feedback.kept.copy()
    with pytest.raises(error, match=message):
        feedback.load(state)
    same_bits(feedback.kept, before)


@for_each("scale", [1e-4, 1.0, 1e4])
def test_what_is_lent_and_what_stays_kept_are_all_that_was_kept(scale):
    source = np.random.default_rng(3)
    values = source.normal(size=64).astype(np.float32)
    kept = (scale * source.normal(size=64)).astype(np.float32)
    feedback = Feedback(registry.make("float32"), Layout.of([(64,)]))
    feedback.load({"kept": kept})
    lent = values.copy()
    feedback.lend(lent)
    assert lent.tobytes() == (values + kept).tobytes()
    # float64 has room for the sum of two float32 of these sizes.
    np.testing.assert_array_equal(
        lent.astype(np.float64) + feedback.kept, values.astype(np.float64) + kept.astype(np.float64)
    )
