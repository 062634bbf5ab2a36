"""The transforms: the inverse exact to the bit on any codes, the forward a DCT to within its rounding."""

import numpy as np
import pytest
import scipy.fft

from shoestring.codec.base import Layout
from shoestring.codec.dct.basis import BASIS_SCALE, integer_basis
from shoestring.codec.dct.format import BLOCKS, MAX_LEVEL
from shoestring.codec.dct.steps import ROUNDING
from tests.unit.codec.cases import for_each
from tests.unit.codec.dct.streams import BACKENDS, decode, encode_with, headers_of, read, sparse_codes, write

BLOCKS_A_TILE = 37  # no multiple of any group
REST = 5


def values_of(codes: np.ndarray, n: int, mantissa: int, exponent: int) -> np.ndarray:
    """The definition, in integers that hold every sum and wrap once, at the end."""
    area = n * n
    blocks = codes.size // area
    own = codes[: blocks * area].reshape(area, blocks).T.reshape(blocks, n, n).astype(np.int64)
    basis = integer_basis(n).astype(np.int64)
    sums = np.einsum("ui,buv,vj->bij", basis, own, basis).reshape(-1)
    sums = np.concatenate([sums, codes[blocks * area :].astype(np.int64) << 18])
    wrapped = (sums + 2**31) % 2**32 - 2**31
    integers = (wrapped + 2048) // 4096 * mantissa
    assert np.abs(integers).max(initial=0) < 2**24
    return (integers * 2.0 ** (exponent - 6)).astype(np.float32)


def hostile_codes(kind: str, size: int, rng: np.random.Generator) -> np.ndarray:
    if kind == "sparse":
        return sparse_codes(size, rng)
    if kind == "one a block":
        return np.where(np.arange(size) % 37 == 0, 3, 0)
    if kind == "full":
        return rng.integers(-300, 301, size)
    if kind == "wrapping":
        return rng.integers(-MAX_LEVEL, MAX_LEVEL + 1, size)
    return np.full(size, MAX_LEVEL if kind == "largest" else -MAX_LEVEL)


@pytest.mark.parametrize("n", BLOCKS)
@for_each("kind", ["sparse", "one a block", "full", "wrapping", "largest", "least"])
def test_inverse_is_exact_on_any_codes(n, kind):
    rng = np.random.default_rng(n)
    size = BLOCKS_A_TILE * n * n + min(REST, n * n - 1)
    layout = Layout.of([(size,)])
    codes = hostile_codes(kind, size, rng)
    for mantissa, exponent in ((16, -4), (31, -100), (23, 100)):
        headers = headers_of(n, chunk_log2=14, mantissa=mantissa, exponent=exponent)
        payload = write(layout, headers, [codes])
        want = values_of(codes, n, mantissa, exponent)
        for backend in BACKENDS:
            np.testing.assert_array_equal(decode(backend, payload, layout), want)


def test_rounding_near_the_end_of_int32_does_not_wrap():
    """2**31 - 1 is rounded up to 2**19, not down to -2**19."""
    n, layout = 3, Layout.of([(9,)])
    basis = integer_basis(n).astype(np.int64)
    rng = np.random.default_rng(0)
    tried = rng.integers(-MAX_LEVEL, MAX_LEVEL + 1, (400_000, n, n))
    first = np.einsum("u,buv,v->b", basis[:, 0], tried, basis[:, 0])
    near = tried[np.abs((first + 2**31) % 2**32 - 2**31 - (2**31 - 1024)) < 1024]
    assert len(near)
    for block in near[:5]:
        payload = write(layout, headers_of(n), [block.reshape(-1)])
        want = values_of(block.reshape(-1), n, 16, -4)
        assert want[0] == 2.0**19 / 64
        for backend in BACKENDS:
            np.testing.assert_array_equal(decode(backend, payload, layout), want)


@pytest.mark.parametrize("n", BLOCKS)
@for_each("backend", BACKENDS)
def test_forward_is_the_cosine_transform(n, backend):
    """A code says in which interval its coefficient lies; the true one is there, but for rounding.

    An encoder may use the integer basis B / 512 for C. With e the norm of their difference and
    X a block, its coefficients are off by at most (2 e + e**2) |X|; two passes of n float32
    products each add at most 2 (n + 2) sqrt(n) 2**-24 |X|.
    """
    layout = Layout.of([(BLOCKS_A_TILE * n * n,)])
    x = np.random.default_rng(n).integers(-4096, 4096, layout.total).astype(np.float32) / 1024
    step = 16 * 2.0**-9
    payload, _ = encode_with(backend, x, layout, headers_of(n, exponent=-9, chunk_log2=14))
    codes = read(payload, layout)[0].reshape(n * n, BLOCKS_A_TILE).T.reshape(-1, n, n)

    blocks = x.astype(np.float64).reshape(-1, n, n)
    exact = scipy.fft.dctn(blocks, axes=(1, 2), norm="ortho") / step
    cosine = scipy.fft.dct(np.eye(n), norm="ortho", axis=0)
    e = np.linalg.norm(integer_basis(n) / BASIS_SCALE - cosine, 2)
    norms = np.linalg.norm(blocks, axis=(1, 2), keepdims=True) / step
    off = norms * (2 * e + e**2 + 2 * (n + 2) * np.sqrt(n) * 2.0**-24) + np.abs(exact) * 2.0**-22
    low = np.where(codes == 0, float(ROUNDING) - 1, np.abs(codes) - float(ROUNDING))
    high = np.abs(codes) + 1 - float(ROUNDING)
    along = exact * np.where(codes < 0, -1, 1)
    assert (along >= low - off).all()
    assert (along <= high + off).all()


@pytest.mark.parametrize("n", BLOCKS)
def test_codes_that_rounding_cannot_move_are_equal_on_all_backends(n, same_bits):
    """Coefficients in the middle of their intervals: then streams and `left_over` are equal byte for byte."""
    rng = np.random.default_rng(n)
    size = BLOCKS_A_TILE * n * n + min(REST, n * n - 1)
    layout = Layout.of([(size,)])
    codes = sparse_codes(size, rng, 0.2, 4)
    middle = codes + np.sign(codes) * (0.5 - float(ROUNDING))
    own = middle[: BLOCKS_A_TILE * n * n].reshape(n * n, -1).T.reshape(-1, n, n)
    blocks = scipy.fft.idctn(own, axes=(1, 2), norm="ortho").reshape(-1)
    x = np.concatenate([blocks, middle[BLOCKS_A_TILE * n * n :]]).astype(np.float32)
    streams, left_over = [], []
    for backend in BACKENDS:
        left_over.append(np.full_like(x, np.nan))
        streams.append(encode_with(backend, x, layout, headers_of(n), left_over[-1])[0])
    np.testing.assert_array_equal(read(streams[0], layout)[0], codes)
    assert streams[0].tobytes() == streams[1].tobytes()
    same_bits(left_over[0], left_over[1])
