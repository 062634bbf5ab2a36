"""The whole codec: backends agree to the bit, nothing is lost, every kind of tensor comes through."""

import numpy as np
import pytest

from shoestring.codec.base import Layout, Vector
from shoestring.codec.dct import format as fmt
from shoestring.codec.dct import stream
from shoestring.codec.dct.codec import Dct
from shoestring.codec.dct.steps import MAGIC
from shoestring.errors import NonFiniteError, UsageError
from tests.unit.codec.cases import BUCKETS, for_each
from tests.unit.codec.dct.streams import BACKENDS, decode, encode_with, headers_of, read, steps_of

LAYOUT = Layout.of(
    [(12, 4, 3, 3), (6, 2, 5, 5), (3, 2, 7, 7), (4, 5, 4, 4), (40, 33), (300,), (10,), (0,), (), (257,)]
)
OPTIONS = {
    "default": {},
    "always": {"transform": "always"},
    "never": {"transform": "never"},
    "block 4": {"block": 4, "transform": "always"},
    "block 8": {"block": 8, "transform": "always"},
    "block 16": {"block": 16, "transform": "always"},
    "block 32": {"block": 32, "transform": "always"},
    "fine": {"step": 0.01, "transform": "always"},
    "finest": {"step": 0.004, "small": 0},
    "coarse": {"step": 50.0},
    "budget": {"bits": 1.5},
    "small as float32": {"small_as": "float32", "small": 1000},
    "none small": {"small": 0},
}
INPUTS = {
    "gaussian": lambda n, rng: rng.standard_normal(n),
    "laplace": lambda n, rng: 1e-5 * rng.laplace(0, 1, n),
    "clusters": lambda n, rng: rng.standard_normal(n) * np.exp(3 * np.sin(np.arange(n) / 50)),
    "spikes": lambda n, rng: np.where(rng.random(n) < 0.01, 1e6, 1.0) * rng.standard_normal(n),
    "constant": lambda n, rng: np.full(n, -3.0),
    "ties": lambda n, rng: rng.integers(-8, 9, n) / 8,
    "near the smallest": lambda n, rng: rng.standard_normal(n) * 2.0**-79,
    "near the largest": lambda n, rng: np.clip(rng.standard_normal(n), -4, 4) * 2.0**92,
}


def values_of(kind: str, layout: Layout = LAYOUT) -> Vector:
    return INPUTS[kind](layout.total, np.random.default_rng(17)).astype(np.float32)


@pytest.mark.parametrize("name", OPTIONS)
@for_each("kind", INPUTS)
def test_backends_decode_each_other_alike(name, kind, same_bits):
    values = values_of(kind)
    before = np.where(values > 0, values, np.float32(-0.0))  # zeros with a sign show what was added to
    for backend in BACKENDS:
        payload = Dct(backend=backend, **OPTIONS[name]).encode(values, LAYOUT)
        assert payload.size <= Dct(**OPTIONS[name]).max_bytes(LAYOUT)
        same_bits(*(decode(other, payload, LAYOUT) for other in BACKENDS))
        for weight in (1.0, -1 / 3, 0.0):
            same_bits(*(decode(other, payload, LAYOUT, before, weight) for other in BACKENDS))


@for_each("kind", INPUTS)
@for_each("name", OPTIONS)
@for_each("backend", BACKENDS)
def test_sent_plus_kept_is_what_came_in(backend, name, kind):
    """Exactly so on the grid that values are rounded to; within half of it of what came in."""
    check_account(backend, values_of(kind), LAYOUT, OPTIONS[name])


@for_each("bucket", BUCKETS)
@for_each("backend", BACKENDS)
def test_sent_plus_kept_on_hard_values(backend, bucket):
    check_account(backend, bucket.values, bucket.layout, {"small": 0})


@for_each("backend", BACKENDS)
@for_each("n", [16, 32])
def test_coefficients_that_are_cut_are_kept(backend, n):
    """Blocks with the largest magnitude throughout, among zeros: 2048 steps a value, 2048 n a coefficient."""
    i, j = np.mgrid[:n, :n]
    wave = np.sign(np.cos(np.pi * (2 * i + 1) * 3 / (2 * n)))
    blocks = np.zeros(((1 << 18) // n**2, n, n), np.float32)
    blocks[:3] = np.ones((n, n)), wave, wave * wave.T
    blocks[3:5] = np.sign(wave + wave.T + 0.5 * wave * wave.T), np.where((i + j) % 2, 1, -1)
    values = blocks.reshape(-1) * np.float32(1.03)
    layout = Layout.of([values.shape])
    options = {"block": n, "transform": "always", "step": 0.004}
    check_account(backend, values, layout, options)
    if n == 32:
        codes = read(Dct(backend=backend, **options).encode(values, layout), layout)[0]
        assert np.abs(codes).max() == fmt.MAX_LEVEL


def check_account(backend: str, values: Vector, layout: Layout, options: dict) -> None:
    left_over = np.full_like(values, np.nan)
    payload = Dct(backend=backend, **options).encode(values, layout, left_over)
    assert payload.tobytes() == Dct(backend=backend, **options).encode(values, layout).tobytes()
    sent = decode(backend, payload, layout)
    total = sent + left_over
    np.testing.assert_array_equal(total.astype(np.float64), sent.astype(np.float64) + left_over)
    headers, steps = steps_of(payload, layout, values)
    grid = np.where(headers["kind"] >= fmt.FIRST_BLOCK_KIND, np.spacing(steps[:, MAGIC]), 0)
    off = np.abs(total.astype(np.float64) - values)
    assert (off <= np.repeat(grid, layout.sizes) / 2).all()
    step = np.ldexp(headers["mantissa"].astype(np.float64), headers["exponent"])
    assert (grid <= step / 1024).all()


@for_each("kind", INPUTS)
def test_untransformed_streams_are_equal_on_all_backends(kind, same_bits):
    values = values_of(kind)
    left_over = [np.full_like(values, np.nan) for _ in BACKENDS]
    streams = [
        Dct(backend=backend, transform="never").encode(values, LAYOUT, own)
        for backend, own in zip(BACKENDS, left_over, strict=True)
    ]
    headers = [stream.parse(payload, LAYOUT).headers for payload in streams]
    np.testing.assert_array_equal(headers[0], headers[1])
    assert streams[0].tobytes() == streams[1].tobytes()
    same_bits(left_over[0], left_over[1])


@for_each("backend", BACKENDS)
@for_each("weight", [1.0, 0.5, -1.0, 1 / 3, 0.0, 1e-40])
def test_decode_adds_weight_times_what_it_sets(backend, weight, same_bits):
    payload = Dct(backend=backend).encode(values_of("gaussian"), LAYOUT)
    before = values_of("laplace")
    want = before + np.float32(weight) * decode(backend, payload, LAYOUT)
    same_bits(decode(backend, payload, LAYOUT, before, weight), want)


@for_each(
    ("shape", "block"),
    [
        ((40, 3, 3, 3), 3),
        ((10, 2, 5, 5), 5),
        ((4, 2, 7, 7), 7),
        ((8, 2, 4, 4), 4),
        ((2, 2, 16, 16), 16),
        ((2, 4, 2, 3, 3), 3),
        ((64, 64, 1, 1), 8),
        ((8, 8, 3, 5), 8),
        ((27, 3, 3), 8),
        ((500,), 8),
    ],
)
@for_each("backend", BACKENDS)
def test_convolutions_are_cut_into_their_kernels(backend, shape, block):
    layout = Layout.of([shape])
    codec = Dct(backend=backend, transform="always", small=0)
    payload = codec.encode(values_of("gaussian", layout), layout)
    kind = int(stream.parse(payload, layout).headers["kind"][0])
    assert fmt.block_of_kind(kind) == block


@for_each("backend", BACKENDS)
def test_transform_is_used_where_it_saves_bits(backend):
    layout = Layout.of([(64, 64), (64, 64)])
    rng = np.random.default_rng(3)
    smooth = np.cumsum(rng.standard_normal(4096))
    values = np.concatenate([smooth, np.where(rng.random(4096) < 0.01, 1, 0)]).astype(np.float32)
    headers = stream.parse(Dct(backend=backend).encode(values, layout), layout).headers
    assert [fmt.block_of_kind(kind) for kind in headers["kind"].tolist()] == [8, 1]


@for_each("backend", BACKENDS)
def test_rest_values_are_coded_with_the_same_step(backend):
    layout = Layout.of([(64 * 5 + 7,)])
    values = values_of("gaussian", layout)
    values[-7:] = [0, 10, -10, 2.5, -2.5, 0.1, 7]
    payload = Dct(backend=backend, transform="always", step=1.0).encode(values, layout)
    headers, _ = steps_of(payload, layout, values)
    step = np.ldexp(float(headers["mantissa"][0]), int(headers["exponent"][0]))
    codes = read(payload, layout)[0][-7:]
    np.testing.assert_array_equal(
        codes, np.sign(values[-7:]) * np.floor(np.abs(values[-7:]) / step + 11 / 32)
    )
    np.testing.assert_array_equal(decode(backend, payload, layout)[-7:], codes * step)


@for_each("backend", BACKENDS)
@for_each("options", [{}, {"small": 0}, {"small_as": "float32"}])
def test_zeros_cost_a_header_each(backend, options):
    values, left_over = np.zeros(LAYOUT.total, np.float32), np.full(LAYOUT.total, np.nan, np.float32)
    payload = Dct(backend=backend, **options).encode(values, LAYOUT, left_over)
    assert payload.size == fmt.headers_bytes(len(LAYOUT.sizes), 0, 0)
    assert not left_over.any()
    assert not decode(backend, payload, LAYOUT).any()


@for_each("shapes", [[], [(0,)], [(0, 3), (2, 0)]])
@for_each("backend", BACKENDS)
def test_nothing_at_all_comes_through(backend, shapes):
    layout = Layout.of(shapes)
    nothing = np.empty(0, np.float32)
    payload = Dct(backend=backend).encode(nothing, layout, nothing.copy())
    assert payload.size == (4 if not shapes else 8)
    assert decode(backend, payload, layout).size == 0


@for_each("backend", BACKENDS)
def test_tensors_too_small_to_send_are_kept(backend, same_bits):
    layout = Layout.of([(400,), (3,)])
    values = (values_of("gaussian", layout) * 2.0**-90).astype(np.float32)
    left_over = np.full_like(values, np.nan)
    payload = Dct(backend=backend).encode(values, layout, left_over)
    assert payload.size == 8
    same_bits(left_over, values)


@for_each("backend", BACKENDS)
def test_tensors_too_large_to_quantise_are_sent_whole(backend, same_bits):
    layout = Layout.of([(400,), (3,)])
    values = (np.clip(values_of("gaussian", layout), -3, 3) * 2.0**126).astype(np.float32)
    left_over = np.full_like(values, np.nan)
    payload = Dct(backend=backend).encode(values, layout, left_over)
    same_bits(decode(backend, payload, layout), values)
    assert not left_over.any()


@for_each("bad", [np.nan, np.inf, -np.inf])
@for_each("tensor", [0, 4, 6, 8, 9])
@for_each("backend", BACKENDS)
def test_non_finite_is_refused_before_anything_is_written(backend, tensor, bad, same_bits):
    values = values_of("gaussian")
    values[LAYOUT.offsets[tensor]] = bad
    left_over = values_of("laplace")
    with pytest.raises(NonFiniteError, match=rf"tensor {tensor} \(shape"):
        Dct(backend=backend).encode(values, LAYOUT, left_over)
    same_bits(left_over, values_of("laplace"))


@for_each(("form", "size", "relative"), [("float16", 2, 2.0**-11), ("float32", 4, 0)])
@for_each("backend", BACKENDS)
def test_small_tensors_are_sent_as_floats(backend, form, size, relative):
    layout = Layout.of([(255,), (4, 4)])
    for scale in (2.0**-75, 1.0, 3.0, 2.0**90):
        values = (scale * np.random.default_rng(1).uniform(1, 2, layout.total)).astype(np.float32)
        payload = Dct(backend=backend, small_as=form).encode(values, layout)
        assert payload.size == 8 + size * layout.total
        off = np.abs(decode(backend, payload, layout).astype(np.float64) - values)
        assert (off <= relative * values).all()


def check_decoders_alike(payload, layout, same_bits) -> None:
    want = decode("numpy", payload, layout)
    same_bits(decode("numba", payload, layout), want)
    out = np.full(layout.total, np.nan, np.float32)
    Dct(threads=3).decode(payload, layout, out)
    same_bits(out, want)


def test_several_tiles_are_alike_on_all_backends_and_threads(same_bits):
    """More than 2**18 values: whole tiles, then one with the rest, for a kernel and for 16 x 16."""
    layout = Layout.of([(3100, 10, 3, 3), (600_001,)])
    rng = np.random.default_rng(2)
    values = (rng.standard_normal(layout.total) * (rng.random(layout.total) < 0.02)).astype(np.float32)
    options = {"block": 0, "transform": "always", "step": 6.0}
    left_over = [np.full_like(values, np.nan) for _ in range(3)]
    one = Dct(**options).encode(values, layout, left_over[0])
    three = Dct(threads=3, **options).encode(values, layout, left_over[1])
    assert one.tobytes() == three.tobytes()
    same_bits(left_over[0], left_over[1])
    assert len(stream.parse(one, layout).geometry.tiles) == 2 + 3
    python = Dct(backend="numpy", **options).encode(values, layout, left_over[2])
    for payload in (one, python):
        check_decoders_alike(payload, layout, same_bits)


def see_nothing(values, layout, question, energy, largest, relative, crew):
    """Measure nothing but zeros, as a sample may that lies beside all that there is."""
    return np.zeros((2, len(question.wanted)))


@for_each("backend", BACKENDS)
def test_chunks_that_hold_too_much_fall_back_to_safe_ones(backend, monkeypatch):
    """A sample that misses all codes asks for the largest chunks, which cannot hold one at every place."""
    monkeypatch.setattr(BACKENDS[backend], "costs", see_nothing)
    layout = Layout.of([(1 << 18,), (300,), (1 << 17,)])
    values = np.resize(np.array([1, -1], np.float32), layout.total)
    values[-(1 << 17) :] *= np.arange(1 << 17) % 2
    values[-5:] = 0  # just as many codes as a chunk may hold
    assert np.count_nonzero(values[-(1 << 17) :]) == fmt.MAX_NONZERO
    left_over = np.full_like(values, np.nan)
    payload = Dct(backend=backend, transform="never", step=1.0).encode(values, layout, left_over)
    headers = stream.parse(payload, layout).headers
    assert headers["chunk_log2"].tolist() == [fmt.SAFE_CHUNK_LOG2, fmt.MAX_CHUNK_LOG2, fmt.MAX_CHUNK_LOG2]
    step = np.ldexp(headers["mantissa"].astype(np.float64), headers["exponent"])
    sent = decode(backend, payload, layout)
    np.testing.assert_array_equal(sent, (np.sign(values) * np.repeat(step, layout.sizes)).astype(np.float32))
    np.testing.assert_array_equal(sent.astype(np.float64) + left_over, values)


@for_each(("n", "chunk_log2"), [(1, 18), (3, 19), (8, 20), (3, 20)])
def test_tiles_share_chunks_alike_on_all_backends_and_threads(n, chunk_log2, same_bits):
    """Five tiles and a rest: codes at both ends of tiles, and runs of zeros that fill whole ones."""
    layout = Layout.of([((1 << 18) * 5 + 7,), (40,)])
    rng = np.random.default_rng(n)
    values = np.zeros(layout.total, np.float32)
    values[rng.integers(0, 1 << 18, 300)] = rng.laplace(0, 40, 300)
    values[[(1 << 18) - 1, 1 << 18, -48, -1]] = [90, -70, 80, 60]
    values[(1 << 20) + rng.integers(0, 1 << 18, 300)] = rng.laplace(0, 40, 300)
    headers = headers_of(n, n, chunk_log2=chunk_log2)
    left_over = [np.full_like(values, np.nan) for _ in BACKENDS]
    one, two = (
        encode_with(backend, values, layout, headers, own)[0]
        for backend, own in zip(BACKENDS, left_over, strict=True)
    )
    geometry = stream.parse(one, layout).geometry
    together = 1 << chunk_log2 - fmt.TILE_LOG2
    assert geometry.chunks == -(-(len(geometry.tiles) - 1) // together) + 1
    assert geometry.chunk_rows[:, fmt.CHUNK_SIZE].sum() == layout.total
    for payload in (one, two):
        check_decoders_alike(payload, layout, same_bits)
        ramp = np.arange(values.size, dtype=np.float32)
        same_bits(decode("numba", payload, layout, ramp, 0.3), decode("numpy", payload, layout, ramp, 0.3))
    same_bits(decode("numpy", one, layout) + left_over[0], decode("numpy", two, layout) + left_over[1])


def test_sparse_buckets_have_chunks_of_several_tiles():
    layout = Layout.of([(1 << 21,)])
    values = np.zeros(layout.total, np.float32)
    values[:: 1 << 14] = 1
    payload = Dct(transform="never", step=1.0).encode(values, layout)
    assert stream.parse(payload, layout).geometry.chunks == 2
    np.testing.assert_array_equal(decode("numba", payload, layout) != 0, values != 0)


@for_each("kind", [bytes, bytearray, memoryview, lambda raw: memoryview(b"x" + raw)[1:]])
def test_any_buffer_decodes(kind, same_bits):
    payload = Dct().encode(values_of("gaussian"), LAYOUT)
    want = decode("numpy", payload, LAYOUT)
    for backend in BACKENDS:
        same_bits(decode(backend, kind(payload.tobytes()), LAYOUT), want)


def test_worst_case_fits_max_bytes():
    """Dense codes as fine as they come, of every size."""
    for size in (1, 2, 63, 1000, 5000):
        layout = Layout.of([(size,)] * 3)
        values = np.random.default_rng(size).laplace(0, 1, layout.total).astype(np.float32)
        for options in ({"step": 0.004, "small": 0}, {"small_as": "float32", "small": 1 << 20}):
            codec = Dct(transform="never", **options)
            assert codec.encode(values, layout).size <= codec.max_bytes(layout)


@for_each(
    "options",
    [{"block": 3}, {"transform": "some"}, {"step": 0.0}, {"bits": 0.0}, {"small": -1}, {"small_as": "int8"}],
)
def test_options_out_of_range_are_refused(options):
    with pytest.raises(UsageError):
        Dct(**options)


def test_unknown_backend_is_refused():
    with pytest.raises(UsageError, match="no backend `cobol`"):
        Dct(backend="cobol")


def test_the_largest_steps_can_be_read_back():
    """The exponent of a step over huge values must not leave its range."""
    for largest in (2.0**89, 2.0**90 * 0.99, 2.0**95 * 0.99):
        values = np.full(1024, largest, np.float32)
        layout = Layout.of([(1024,)])
        decode("numba", Dct(step=1024.0).encode(values, layout), layout)


def test_tensors_smaller_than_a_block_count_in_the_budget():
    layout = Layout.of([(1000,)] * 50)
    values = np.random.default_rng(3).laplace(size=layout.total).astype(np.float32)
    payload = Dct(bits=1.0, block=32).encode(values, layout)
    assert 8 * payload.size / layout.total == pytest.approx(1.0, rel=0.15)
