"""The parser accepts what an encoder writes and refuses every kind of damage."""

import numpy as np
import pytest

from shoestring.codec.base import Layout
from shoestring.codec.dct import format as stream
from shoestring.codec.dct.codec import Dct
from shoestring.errors import StreamError
from tests.unit.codec.dct.streams import BACKENDS, decode

LAYOUT = Layout.of([(10, 4, 3, 3), (40, 30), (7,), (0,), (300,)])
BLOCKS, SMALL, EMPTY = 1, 2, 3  # tensors that are sent as blocks, as floats, and as nothing


@pytest.fixture(scope="module")
def payload() -> np.ndarray:
    values = np.random.default_rng(5).standard_normal(LAYOUT.total).astype(np.float32)
    return Dct().encode(values, LAYOUT)


def field_at(tensor: int, field: str) -> int:
    """The byte of a field of a tensor's header."""
    offset = stream.TENSOR.fields[field][1]
    return stream.PREFIX.itemsize + tensor * stream.TENSOR.itemsize + offset


def with_byte(payload: np.ndarray, at: int, value: int) -> np.ndarray:
    changed = payload.copy()
    changed[at] = value & 0xFF
    return changed


def test_headers_have_no_padding():
    assert (stream.PREFIX.itemsize, stream.TENSOR.itemsize, stream.CHUNK.itemsize) == (4, 4, 4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_truncation_at_every_byte_is_refused(payload, backend):
    for length in range(payload.size):
        with pytest.raises(StreamError, match="bytes"):
            decode(backend, payload[:length], LAYOUT)


@pytest.mark.parametrize("more", [1, 2, 4, 100])
def test_more_bytes_are_refused(payload, more):
    longer = np.concatenate([payload, np.zeros(more, np.uint8)])
    with pytest.raises(StreamError, match="the chunks add up to"):
        stream.parse(longer, LAYOUT)


@pytest.mark.parametrize("codec", [0, 1, 0xDB, 0xFF])
def test_other_codec_is_refused(payload, codec):
    with pytest.raises(StreamError, match="not a dct stream"):
        stream.parse(with_byte(payload, 0, codec), LAYOUT)


@pytest.mark.parametrize("version", [0, 2, 255])
def test_other_version_is_refused(payload, version):
    with pytest.raises(StreamError, match=f"version {version}") as caught:
        stream.parse(with_byte(payload, 1, version), LAYOUT)
    assert "same version" in caught.value.hint


@pytest.mark.parametrize(("at", "value"), [(2, 4), (2, 6), (2, 0), (3, 1)])
def test_other_number_of_tensors_is_refused(payload, at, value):
    with pytest.raises(StreamError, match="tensors, the layout 5"):
        stream.parse(with_byte(payload, at, value), LAYOUT)


@pytest.mark.parametrize(
    ("tensor", "field", "value"),
    [
        *[(BLOCKS, "kind", kind) for kind in (stream.KINDS, 128, 255)],
        *[(EMPTY, "kind", kind) for kind in (stream.KINDS, 255)],
        *[(BLOCKS, "chunk_log2", log) for log in (0, 9, 19, 64, 255)],
        *[(BLOCKS, "mantissa", mantissa) for mantissa in (0, 15, 32, 255)],
        *[(BLOCKS, "exponent", exponent) for exponent in (-128, -101, 101, 127)],
        *[(SMALL, "exponent", exponent) for exponent in (-128, -101, 101, 127)],
    ],
)
def test_header_out_of_range_is_refused(payload, tensor, field, value):
    with pytest.raises(StreamError, match=f"header of tensor {tensor} is out of range"):
        stream.parse(with_byte(payload, field_at(tensor, field), value), LAYOUT)


@pytest.mark.parametrize("exponent", [stream.MIN_EXPONENT, stream.MAX_EXPONENT])
@pytest.mark.parametrize("mantissa", [stream.MIN_MANTISSA, stream.MAX_MANTISSA])
def test_header_at_its_limits_decodes_to_finite_values(payload, mantissa, exponent):
    changed = with_byte(payload, field_at(BLOCKS, "mantissa"), mantissa)
    for tensor in (BLOCKS, SMALL):
        changed = with_byte(changed, field_at(tensor, "exponent"), exponent)
    results = [decode(backend, changed, LAYOUT) for backend in BACKENDS]
    assert np.isfinite(results[0]).all()
    assert results[0].tobytes() == results[1].tobytes()


def test_chunk_that_claims_other_lengths_is_refused(payload):
    at = stream.parse(payload, LAYOUT).geometry.chunks_at
    for bit in range(18):
        changed = payload.copy()
        changed[at + bit // 8] ^= 1 << bit % 8
        with pytest.raises(StreamError, match="the chunks add up to"):
            stream.parse(changed, LAYOUT)


@pytest.mark.parametrize("bits", [0x7C00, 0xFC00, 0x7E00, 0x7C01])
def test_small_floats_that_are_not_finite_are_refused(payload, bits):
    parsed = stream.parse(payload, LAYOUT)
    assert parsed.geometry.floats.tensors.tolist() == [SMALL]
    at = parsed.geometry.words_at - 2 * parsed.geometry.floats.words
    changed = payload.copy()
    changed[at : at + 2] = [bits & 0xFF, bits >> 8]
    for backend in BACKENDS:
        with pytest.raises(StreamError, match="tensor 2 holds NaN or infinity"):
            decode(backend, changed, LAYOUT)


def test_every_part_is_where_the_geometry_says(payload):
    parsed = stream.parse(payload, LAYOUT)
    geometry = parsed.geometry
    assert geometry.chunks_at == 4 + 4 * 5
    assert geometry.words_at == geometry.chunks_at + 4 * geometry.chunks + 2 * 7
    assert payload.size == geometry.words_at + 2 * parsed.words.size
    floats = payload[geometry.words_at - 14 : geometry.words_at].view("<u2")
    assert parsed.word_starts[0] == 0
    assert parsed.word_starts[-1] == parsed.words.size
    again = stream.join(parsed.headers, parsed.chunks, floats, parsed.words)
    assert again.tobytes() == payload.tobytes()


@pytest.mark.parametrize("n", stream.BLOCKS)
@pytest.mark.parametrize("size", [1, 8, 9, 1000, 1 << 18, (1 << 18) + 1, (1 << 19) + 1023, 1_000_000])
def test_tiles_cover_a_tensor_in_order(n, size):
    tiles = stream.cut(size, n)
    starts = [start for start, _, _ in tiles]
    assert starts == np.cumsum([0] + [values for _, _, values in tiles])[:-1].tolist()
    assert sum(values for _, _, values in tiles) == size
    assert sum(blocks for _, blocks, _ in tiles) == size // (n * n)
    for _, blocks, values in tiles[:-1]:
        assert values == blocks * n * n
        assert values <= stream.TILE_VALUES
    assert tiles[-1][2] < stream.TILE_VALUES + n * n


def test_many_tensors_wrap_in_the_prefix():
    layout = Layout.of([(0,)] * 70_000)
    payload = Dct().encode(np.empty(0, np.float32), layout)
    assert payload.size == 4 + 4 * 70_000
    assert int(payload[:4].view(stream.PREFIX)["tensors"][0]) == 70_000 - 65_536
    decode("numba", payload, layout)
