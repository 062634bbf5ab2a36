"""The chunk coder: compiled and pure Python agree, codes come back, and the rate is near the entropy."""

import numpy as np
import pytest

from shoestring.codec.base import Layout
from shoestring.codec.dct import format as fmt
from shoestring.codec.dct import reference, stream
from shoestring.codec.dct.reference import decode_chunk, encode_chunk
from shoestring.codec.dct.tables import EXTRA, START
from shoestring.errors import StreamError
from tests.unit.codec.cases import for_each
from tests.unit.codec.dct.streams import (
    BACKENDS,
    NOTHING,
    decode,
    encode_with,
    headers_of,
    read,
    sparse_codes,
    write,
)

CHUNK = 1 << 18  # that of one tile
LARGEST = 1 << fmt.MAX_CHUNK_LOG2


def alone(size: int, places, levels) -> np.ndarray:
    codes = np.zeros(size, np.int64)
    codes[places] = levels
    return codes


CODES = {
    "nothing": np.zeros(1000, np.int64),
    "one value": np.array([1]),
    "first of two": np.array([-1, 0]),
    "last of two": np.array([0, -3]),
    "last of the largest chunk": alone(CHUNK, CHUNK - 1, 1),
    "first of the largest chunk": alone(CHUNK, 0, -1),
    "both ends of the largest chunk": alone(CHUNK, [0, CHUNK - 1], [fmt.MAX_LEVEL, -fmt.MAX_LEVEL]),
    "largest levels": np.tile([fmt.MAX_LEVEL, -fmt.MAX_LEVEL], 500),
    "one largest level among small": alone(1000, np.arange(1000), np.arange(1000) // 999 * 32766 + 1),
    "every level once": np.arange(1, fmt.MAX_LEVEL + 1) * np.resize([1, -1], fmt.MAX_LEVEL),
    "every place": np.resize([1, -1, -1], 4096),
    "every gap once": alone(3000, np.cumsum(np.arange(76)), 1),
    "tail of every symbol's first value": alone(CHUNK, 3, 7),
    "sparse": sparse_codes(50_000, np.random.default_rng(1), 0.01),
    "dense": sparse_codes(5000, np.random.default_rng(2), 0.9, 300),
    "clusters": sparse_codes(20_000, np.random.default_rng(3), 0.5) * (np.arange(20_000) % 1000 < 50),
    "last of four tiles": alone(LARGEST, LARGEST - 1, 1),
    "first of four tiles": alone(LARGEST, 0, -1),
    "gaps as long as one may be": alone(LARGEST, fmt.MAX_GAP + (fmt.MAX_GAP + 1) * np.arange(3), [1, 2, -3]),
    "gaps a little too long": alone(LARGEST, fmt.MAX_GAP + 1 + (fmt.MAX_GAP + 2) * np.arange(3), [1, 2, -3]),
    "gaps twice too long": alone(LARGEST, [2 * fmt.MAX_GAP + 1, 2 * fmt.MAX_GAP + 2], [-5, 5]),
    "tail just too long": alone(LARGEST, LARGEST - fmt.MAX_GAP - 3, 1),
    "tail just not too long": alone(LARGEST, LARGEST - fmt.MAX_GAP - 2, 1),
    "most that a chunk may hold": alone(CHUNK, np.arange(fmt.MAX_NONZERO) * 4, -2),
}


def numba_words(codes: np.ndarray) -> tuple[int, list[int]]:
    """The header and the words that the compiled coder makes of one chunk."""
    layout = Layout.of([(codes.size,)])
    headers = headers_of(1, chunk_log2=fmt.MAX_CHUNK_LOG2)
    payload, _ = encode_with("numba", codes.astype(np.float32), layout, headers)
    parsed = stream.parse(payload, layout)
    return int(parsed.chunks[0]), parsed.words.tolist()


@for_each("kind", CODES)
def test_compiled_words_are_the_reference_words(kind):
    header, words = encode_chunk(CODES[kind])
    assert numba_words(CODES[kind]) == (header, words)
    assert header & fmt.MAX_WORDS == len(words)


@for_each("kind", CODES)
def test_codes_come_back(kind):
    codes = CODES[kind]
    header, words = encode_chunk(codes)
    np.testing.assert_array_equal(decode_chunk(header, np.array(words, np.uint16), codes.size), codes)


@for_each("kind", CODES)
def test_compiled_decoder_gives_the_same_values(kind, same_bits):
    layout = Layout.of([(CODES[kind].size,)])
    tiles = np.split(CODES[kind], range(CHUNK, CODES[kind].size, CHUNK))
    payload = write(layout, headers_of(1, chunk_log2=fmt.MAX_CHUNK_LOG2), tiles)
    same_bits(decode("numba", payload, layout), decode("numpy", payload, layout))
    np.testing.assert_array_equal(np.concatenate(read(payload, layout)), CODES[kind])


@for_each("tail", [0, 1, 2, 3, 4, 5, 6, 7, 8, 100, 65535, 65536, 200_000])
def test_tails_and_gaps_of_every_kind(tail, same_bits):
    codes = alone(2 * tail + 2, [tail, tail + 1], [5, -1])
    layout = Layout.of([(codes.size,)])
    header, words = encode_chunk(codes[:CHUNK])
    assert numba_words(codes[:CHUNK]) == (header, words)
    tiles = [codes[:CHUNK], codes[CHUNK:]] if codes.size > CHUNK else [codes]
    payload = write(layout, headers_of(1, chunk_log2=18), tiles)
    same_bits(decode("numba", payload, layout), codes.astype(np.float32))


def test_empty_chunk_has_no_words():
    assert encode_chunk(CODES["nothing"]) == (0, [])


def test_chunk_of_zeros_with_words_decodes(same_bits):
    """No encoder writes it, but it is whole: one gap as long as the chunk."""
    layout, table, size = Layout.of([(2000,)]), 5, 2000
    backwards: list[int] = []
    writer = reference._Writer(table, backwards)
    symbol = int(reference.symbols_of(np.array(size)))
    writer.put_bits(int(EXTRA[symbol]), size - int(START[symbol]))
    writer.put(symbol)
    words = [writer.state & 0xFFFF, writer.state >> 16, 0, reference.LOWEST >> 16, *backwards[::-1]]
    chunk = np.array([len(words) | table << 18], fmt.CHUNK)
    geometry = fmt.lay_out(layout, headers_of(1))
    payload = stream.join(headers_of(1), geometry, chunk, NOTHING, np.array(words, "<u2"))
    for backend in BACKENDS:
        same_bits(decode(backend, payload, layout), np.zeros(size, np.float32))


def test_a_level_that_is_none_stands_for_a_zero_anywhere(same_bits):
    """An encoder cuts gaps with it, but a decoder takes it at any place, beside any code."""
    codes = sparse_codes(3000, np.random.default_rng(5), 0.3)
    cut = np.where(np.arange(3000) % 7 == 3, fmt.NO_CODE, codes)
    layout = Layout.of([(codes.size,)])
    payload = write(layout, headers_of(1, chunk_log2=10), [cut])
    for backend in BACKENDS:
        want = np.where(cut == fmt.NO_CODE, 0, codes)
        same_bits(decode(backend, payload, layout), want.astype(np.float32))


@for_each("place", [0, 1, 700, 1999])
def test_a_level_beyond_that_is_refused(place):
    codes = sparse_codes(2000, np.random.default_rng(6), 0.5)
    codes[place] = fmt.NO_CODE + 1
    layout = Layout.of([(codes.size,)])
    payload = write(layout, headers_of(1, chunk_log2=10), [codes])
    for backend in BACKENDS:
        with pytest.raises(StreamError, match="is damaged"):
            decode(backend, payload, layout)


@for_each("share", [0.01, 0.1, 0.9])
def test_every_changed_bit_is_refused_or_decoded_alike(share):
    """Most damage spoils the final states. A sign or a low bit may change unseen: words have no checksum."""
    codes = sparse_codes(1500, np.random.default_rng(7), share)
    layout = Layout.of([(codes.size,)])
    payload = write(layout, headers_of(1), [codes])
    first = stream.parse(payload, layout).geometry.chunks_at
    outcomes = []
    for at in range(first, min(payload.size, first + 120)):
        for bit in range(8):
            wrong = payload.copy()
            wrong[at] ^= 1 << bit
            outcomes.append(outcome("numpy", wrong, layout))
            assert outcome("numba", wrong, layout) == outcomes[-1]
    assert outcomes.count(None) > len(outcomes) / 2


def outcome(backend: str, payload: np.ndarray, layout: Layout) -> bytes | None:
    try:
        return decode(backend, payload, layout).tobytes()
    except StreamError:
        return None


def entropy_bits(codes: np.ndarray) -> float:
    counts = np.unique(codes, return_counts=True)[1]
    return float(-(counts * np.log2(counts / codes.size)).sum())


@for_each("scale", [0.1, 0.2, 0.4, 0.8, 1.6, 3.2])
def test_rate_of_independent_codes_is_near_their_entropy(scale):
    """Laplace values in units of the step; from 0.02 to more than 4 bits a value."""
    values = np.random.default_rng(11).laplace(0, scale, 1 << 16)
    codes = (np.sign(values) * np.floor(np.abs(values) + 11 / 32)).astype(np.int64)
    bits = 0
    for begin in range(0, codes.size, 1 << 15):
        bits += 16 * len(encode_chunk(codes[begin : begin + (1 << 15)])[1])
    overhead = 2 * 2 * 64  # two chunks, each with two states, and what they round up
    assert bits < 1.03 * entropy_bits(codes) + overhead


def test_rate_of_dense_signs_is_near_one_bit():
    codes = np.random.default_rng(13).choice([-1, 1], 1 << 15)
    assert 16 * len(encode_chunk(codes)[1]) < 1.03 * codes.size + 128
