"""The parser accepts what an encoder writes and refuses every kind of damage."""

import numpy as np
import pytest

from shoestring.codec.base import Layout
from shoestring.codec.dct import format as fmt
from shoestring.codec.dct import stream
from shoestring.codec.dct.codec import Dct
from shoestring.errors import StreamError
from tests.unit.codec.cases import for_each
from tests.unit.codec.dct.streams import BACKENDS, decode

LAYOUT = Layout.of([(10, 4, 3, 3), (40, 30), (7,), (0,), (300,)])
BLOCKS, SMALL, EMPTY = 1, 2, 3  # tensors that are sent as blocks, as floats, and as nothing


@pytest.fixture(scope="module")
def payload() -> np.ndarray:
    values = np.random.default_rng(5).standard_normal(LAYOUT.total).astype(np.float32)
    return Dct().encode(values, LAYOUT)


# Where tensor headers lie in the stream: five kinds, then exponents of 0, 1, 2 and 4, then what is
# left of 0, 1 and 4.
KIND_AT = {BLOCKS: 4 + BLOCKS, EMPTY: 4 + EMPTY}
EXPONENT_AT = {BLOCKS: 10, SMALL: 11}
SIZES_AT = {BLOCKS: 14}


def with_byte(payload: np.ndarray, at: int, value: int) -> np.ndarray:
    changed = payload.copy()
    changed[at] = value & 0xFF
    return changed


def test_headers_lie_where_the_specification_says(payload):
    headers = stream.parse(payload, LAYOUT).headers
    assert headers["kind"].tolist() == payload[4:9].tolist()
    assert (headers["kind"] >= fmt.FIRST_BLOCK_KIND).tolist() == [True, True, False, False, True]
    assert headers["exponent"][[0, 1, 2, 4]].tolist() == payload[9:13].view(np.int8).tolist()
    coded = headers[[0, 1, 4]]
    assert ((coded["chunk_log2"] - 10) * 16 + coded["mantissa"] - 16).tolist() == payload[13:16].tolist()
    assert stream.parse(payload, LAYOUT).geometry.chunks_at == 16


@for_each("more", range(4))
def test_headers_are_padded_to_whole_chunk_headers(more):
    layout = Layout.of([(0,)] * more + [(300,)])
    payload = Dct().encode(np.ones(300, np.float32), layout)
    assert stream.parse(payload, layout).geometry.chunks_at == 8 + 4 * (more > 1)
    assert not payload[7 + more : 8 + 4 * (more > 1)].any()


@for_each("backend", BACKENDS)
def test_truncation_at_every_byte_is_refused(payload, backend):
    for length in range(payload.size):
        with pytest.raises(StreamError, match="bytes"):
            decode(backend, payload[:length], LAYOUT)


@for_each("more", [1, 2, 4, 100])
def test_more_bytes_are_refused(payload, more):
    longer = np.concatenate([payload, np.zeros(more, np.uint8)])
    with pytest.raises(StreamError, match="the chunks add up to"):
        stream.parse(longer, LAYOUT)


@for_each("codec", [0, 1, 0xDB, 0xFF])
def test_other_codec_is_refused(payload, codec):
    with pytest.raises(StreamError, match="not a dct stream"):
        stream.parse(with_byte(payload, 0, codec), LAYOUT)


@for_each("version", [0, 1, 3, 255])
def test_other_version_is_refused(payload, version):
    with pytest.raises(StreamError, match=f"version {version}") as caught:
        stream.parse(with_byte(payload, 1, version), LAYOUT)
    assert "same version" in caught.value.hint


@for_each(("at", "value"), [(2, 4), (2, 6), (2, 0), (3, 1)])
def test_other_number_of_tensors_is_refused(payload, at, value):
    with pytest.raises(StreamError, match="tensors, the layout 5"):
        stream.parse(with_byte(payload, at, value), LAYOUT)


@for_each(
    ("tensor", "at", "value"),
    [
        *[(BLOCKS, KIND_AT[BLOCKS], kind) for kind in (fmt.KINDS, 128, 255)],
        *[(EMPTY, KIND_AT[EMPTY], kind) for kind in (fmt.KINDS, 255)],
        *[(BLOCKS, SIZES_AT[BLOCKS], (log - 10) << 4) for log in (21, 25)],
        *[(BLOCKS, EXPONENT_AT[BLOCKS], exponent) for exponent in (-128, -101, 101, 127)],
        *[(SMALL, EXPONENT_AT[SMALL], exponent) for exponent in (-128, -101, 101, 127)],
    ],
)
def test_header_out_of_range_is_refused(payload, tensor, at, value):
    with pytest.raises(StreamError, match=f"header of tensor {tensor} is out of range"):
        stream.parse(with_byte(payload, at, value), LAYOUT)


def test_headers_that_do_not_fit_the_stream_are_refused():
    """All of three tensors are said to be coded, but there are no bytes behind their kinds."""
    layout = Layout.of([(300,)] * 3)
    payload = Dct().encode(np.zeros(900, np.float32), layout)
    payload[4:7] = fmt.FIRST_BLOCK_KIND
    with pytest.raises(StreamError, match="too few for the headers of 3 tensors"):
        stream.parse(payload, layout)


@for_each("exponent", [fmt.MIN_EXPONENT, fmt.MAX_EXPONENT])
@for_each("mantissa", [fmt.MIN_MANTISSA, fmt.MAX_MANTISSA])
def test_header_at_its_limits_decodes_to_finite_values(payload, mantissa, exponent):
    chunk_log2 = payload[SIZES_AT[BLOCKS]] >> 4
    changed = with_byte(payload, SIZES_AT[BLOCKS], chunk_log2 << 4 | mantissa - 16)
    for at in EXPONENT_AT.values():
        changed = with_byte(changed, at, exponent)
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


@for_each("bits", [0x7C00, 0xFC00, 0x7E00, 0x7C01])
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
    assert geometry.chunks_at == 4 + 5 + 4 + 3
    assert geometry.floats_at == geometry.chunks_at + 4 * geometry.chunks
    assert geometry.words_at == geometry.chunks_at + 4 * geometry.chunks + 2 * 7
    assert payload.size == geometry.words_at + 2 * parsed.words.size
    floats = payload[geometry.words_at - 14 : geometry.words_at].view("<u2")
    assert parsed.word_starts[0] == 0
    assert parsed.word_starts[-1] == parsed.words.size
    again = stream.join(parsed.headers, geometry, parsed.chunks, floats, parsed.words)
    assert again.tobytes() == payload.tobytes()


@for_each("n", fmt.BLOCKS)
@for_each("size", [1, 8, 9, 1000, 1 << 18, (1 << 18) + 1, (1 << 19) + 1023, 1_000_000])
def test_tiles_cover_a_tensor_in_order(n, size):
    tiles = fmt.cut(size, n)
    starts = [start for start, _, _ in tiles]
    assert starts == np.cumsum([0] + [values for _, _, values in tiles])[:-1].tolist()
    assert sum(values for _, _, values in tiles) == size
    assert sum(blocks for _, blocks, _ in tiles) == size // (n * n)
    for _, blocks, values in tiles[:-1]:
        assert values == blocks * n * n
        assert values <= fmt.TILE_VALUES
    assert tiles[-1][2] < fmt.TILE_VALUES + n * n


def test_many_tensors_wrap_in_the_prefix():
    layout = Layout.of([(0,)] * 70_000)
    payload = Dct().encode(np.empty(0, np.float32), layout)
    assert payload.size == 4 + 70_000
    assert int(payload[2:4].view("<u2")[0]) == 70_000 - 65_536
    decode("numba", payload, layout)
