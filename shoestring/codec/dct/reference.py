"""The NumPy backend: what the codec does, written to be read.

Decoding is the definition. Every other backend gives the same bits as `decode` on any
stream, and refuses the same streams. Encoding is an example: an encoder may transform
in any precision and choose any code it likes. Given the same codes, tables and words
are the same on all backends, and so is `left_over`.

Arrays hold the codes of whole tiles, zeros included, in planar order. The states of
the entropy coder are Python integers.
"""

import itertools
import math
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoestring.codec.base import Layout, Payload, Vector
from shoestring.codec.dct import floats
from shoestring.codec.dct import format as fmt
from shoestring.codec.dct.basis import integer_basis
from shoestring.codec.dct.choice import Chunking, Floats, Question, is_coded
from shoestring.codec.dct.sampling import run_starts, sample_shape
from shoestring.codec.dct.steps import MANTISSA, ROUNDING, SCALE, Steps
from shoestring.codec.dct.stream import Stream, join
from shoestring.codec.dct.tables import COST, COST_ONE_BIT, CUM, EXTRA, FREQ, PROBABILITY_BITS, SLOT, START
from shoestring.compiled.crew import Crew
from shoestring.errors import StreamError

Codes = NDArray[np.int64]

LOWEST = 1 << 16  # a state's smallest value, and what both begin and end with

CHUNKING = Chunking(bits=8192, most_log2=fmt.MAX_CHUNK_LOG2)


@cache
def cosine_basis(n: int) -> NDArray[np.float64]:
    """Return the orthonormal DCT-II matrix; row u is the cosine of frequency u."""
    u, i = np.mgrid[:n, :n]
    basis: NDArray[np.float64] = np.sqrt(2 / n) * np.cos(np.pi * (2 * i + 1) * u / (2 * n))
    basis[0] = math.sqrt(1 / n)
    return basis


def to_planar(blocks: NDArray[Any], rest: NDArray[Any]) -> NDArray[Any]:
    """Turn [blocks, n, n] and the rest into one row: all of the first frequency, of the second, ..."""
    return np.concatenate([blocks.reshape(len(blocks), blocks.shape[1] ** 2).T.reshape(-1), rest])


def from_planar(codes: NDArray[Any], blocks: int, n: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return blocks and rest: the inverse of `to_planar`."""
    area = n * n
    return codes[: blocks * area].reshape(area, blocks).T.reshape(blocks, n, n), codes[blocks * area :]


def forward(x: Vector, blocks: int, n: int) -> Vector:
    """Transform a tile; return its coefficients and the rest in planar order."""
    cosine = cosine_basis(n)
    own = x[: blocks * n * n].reshape(blocks, n, n).astype(np.float64)
    coefficients = np.einsum("ui,bij,vj->buv", cosine, own, cosine, optimize=True)
    return to_planar(coefficients.astype(np.float32), x[blocks * n * n :])


def quantise(coefficients: Vector, inverse_step: np.float32, threshold: np.float32) -> Codes:
    """Round to codes, with a dead zone around zero; float32 throughout, as in the other backends."""
    magnitudes = np.abs(coefficients)
    levels = np.clip((magnitudes * inverse_step + ROUNDING).astype(np.int64), 1, fmt.MAX_LEVEL)
    signed: Codes = np.where(coefficients > 0, levels, -levels)
    return np.where(magnitudes >= threshold, signed, 0)


def inverse(blocks: Codes) -> Codes:
    """Transform codes [blocks, n, n] to integers, 2**18 to a step. Sums wrap at 32 bits."""
    basis = integer_basis(blocks.shape[1]).astype(np.int64)
    half = np.einsum("ui,buv->biv", basis, blocks).astype(np.int32).astype(np.int64)
    integers: Codes = np.einsum("biv,vj->bij", half, basis).astype(np.int32).astype(np.int64)
    return integers


def to_values(integers: Codes, mantissa: np.float32, scale: np.float32) -> Vector:
    """Turn integers of `inverse` into floats; exact, because they are below 2**24."""
    rounded = (integers + (1 << (fmt.INVERSE_SHIFT - 1))) >> fmt.INVERSE_SHIFT  # this sum does not wrap
    return (rounded * int(mantissa)).astype(np.float32) * scale


def tile_values(codes: Codes, blocks: int, n: int, mantissa: np.float32, scale: np.float32) -> Vector:
    """Return the values that a tile's codes stand for."""
    own, rest = from_planar(codes, blocks, n)
    integers = np.concatenate([inverse(own).reshape(-1), inverse(rest.reshape(-1, 1, 1)).reshape(-1)])
    return to_values(integers, mantissa, scale)


def touched(codes: Codes, blocks: int, n: int) -> NDArray[np.bool_]:
    """Return a mask of the values that decoding changes: blocks that have a code, and coded rest values."""
    own, rest = from_planar(codes, blocks, n)
    return np.concatenate([np.repeat(own.any(axis=(1, 2)), n * n), rest != 0])


def symbols_of(values: Codes) -> Codes:
    """Return the symbol of each value below 2**18."""
    return np.searchsorted(START, values, side="right") - 1


def cheapest_table(symbols: Codes) -> int:
    """Return the table that codes these symbols in the fewest bits; of equals, the first."""
    histogram = np.bincount(symbols, minlength=COST.shape[1])
    return int(np.argmin(COST @ histogram))


class _Writer:
    """One rANS state that spills into words shared with the other one."""

    def __init__(self, table: int, words: list[int]) -> None:
        self.state = LOWEST
        self._freq, self._cum = FREQ[table].tolist(), CUM[table].tolist()
        self._words = words

    def put(self, symbol: int) -> None:
        freq = self._freq[symbol]
        if self.state >= freq << 20:
            self._spill()
        self.state = (self.state // freq << PROBABILITY_BITS) + self.state % freq + self._cum[symbol]

    def put_bits(self, bits: int, value: int) -> None:
        if self.state >= 1 << (32 - bits):
            self._spill()
        self.state = self.state << bits | value

    def _spill(self) -> None:
        self._words.append(self.state & 0xFFFF)
        self.state >>= 16


def cut_gaps(codes: Codes) -> Codes:
    """Put `NO_CODE` where a run of zeros ends that is as long as one may be."""
    places = np.flatnonzero(codes)
    cut = codes.copy()
    for before, end in itertools.pairwise([-1, *places, codes.size] if places.size else []):
        cut[before + fmt.MAX_GAP + 1 : end : fmt.MAX_GAP + 1] = fmt.NO_CODE
    return cut


def encode_chunk(codes: Codes) -> tuple[int, list[int]]:
    """Return the header and the words of one chunk."""
    codes = cut_gaps(codes)
    places = np.flatnonzero(codes)
    if places.size == 0:
        return 0, []
    tail = codes.size - 1 - int(places[-1])
    gaps = np.diff(places, prepend=-1) - 1
    if tail:
        gaps = np.append(gaps, tail)  # the terminator: a gap that ends at the chunk's end
    above = np.abs(codes[places]) - 1
    gap_symbols, level_symbols = symbols_of(gaps), symbols_of(above)
    gap_table, level_table = cheapest_table(gap_symbols), cheapest_table(level_symbols)
    gap_rests = (gaps - START[gap_symbols]).tolist()
    level_rests = ((above - START[level_symbols]) << 1 | (codes[places] < 0)).tolist()

    backwards: list[int] = []
    gap_writer, level_writer = _Writer(gap_table, backwards), _Writer(level_table, backwards)
    for i in range(gaps.size - 1, -1, -1):
        if i < places.size:
            level_symbol = int(level_symbols[i])
            level_writer.put_bits(int(EXTRA[level_symbol]) + 1, level_rests[i])
            level_writer.put(level_symbol)
        gap_symbol = int(gap_symbols[i])
        gap_writer.put_bits(int(EXTRA[gap_symbol]), gap_rests[i])
        gap_writer.put(gap_symbol)
    states = [gap_writer.state & 0xFFFF, gap_writer.state >> 16]
    states += [level_writer.state & 0xFFFF, level_writer.state >> 16]
    words = states + backwards[::-1]
    return len(words) | gap_table << 18 | level_table << 25, words


class _DamagedError(Exception):
    pass


class _Words:
    """The words of one chunk, read from the first to the last."""

    def __init__(self, words: list[int]) -> None:
        self._words = words
        self._at = 0

    def next(self) -> int:
        if self._at == len(self._words):
            raise _DamagedError
        self._at += 1
        return self._words[self._at - 1]

    @property
    def are_spent(self) -> bool:
        return self._at == len(self._words)


class _Reader:
    """One rANS state that takes words from a sequence shared with the other one."""

    def __init__(self, table: int, words: _Words) -> None:
        self._freq, self._cum, self._slot = FREQ[table].tolist(), CUM[table].tolist(), SLOT[table]
        self._words = words
        self.state = words.next() | words.next() << 16
        if self.state < LOWEST:
            raise _DamagedError

    def take(self) -> int:
        slot = self.state & ((1 << PROBABILITY_BITS) - 1)
        symbol = int(self._slot[slot])
        self.state = self._freq[symbol] * (self.state >> PROBABILITY_BITS) + slot - self._cum[symbol]
        self._refill()
        return symbol

    def take_bits(self, bits: int) -> int:
        value = self.state & ((1 << bits) - 1)
        self.state >>= bits
        self._refill()
        return value

    def _refill(self) -> None:
        if self.state < LOWEST:  # once is enough: more than 16 bits belong to no level that is allowed
            self.state = self.state << 16 | self._words.next()


def decode_chunk(header: int, own: NDArray[np.uint16], size: int) -> Codes | None:
    """Return a chunk's codes, or None if no encoder could have written its words."""
    codes = np.zeros(size, np.int64)
    if own.size == 0:
        return codes
    words = _Words(own.tolist())
    try:
        gaps, levels = _Reader(header >> 18 & 127, words), _Reader(header >> 25, words)
        position = 0
        while position < size:
            symbol = gaps.take()
            position += int(START[symbol]) + gaps.take_bits(int(EXTRA[symbol]))
            if position >= size:
                break
            symbol = levels.take()
            rest = levels.take_bits(int(EXTRA[symbol]) + 1)
            level = int(START[symbol]) + (rest >> 1) + 1
            if level > fmt.NO_CODE:
                return None
            if level < fmt.NO_CODE:
                codes[position] = -level if rest & 1 else level
            position += 1
    except _DamagedError:
        return None
    is_whole = position == size and words.are_spent and gaps.state == levels.state == LOWEST
    return codes if is_whole else None


def scan(values: Vector, layout: Layout, crew: Crew) -> tuple[Floats, Floats, int]:
    """Return each tensor's energy and largest magnitude, and the first that is not finite or -1."""
    energy, largest = np.zeros(len(layout.sizes)), np.zeros(len(layout.sizes))
    for index, size in enumerate(layout.sizes):
        own = values[layout.offsets[index] : layout.offsets[index] + size].astype(np.float64)
        if not np.isfinite(own).all():
            return energy, largest, index
        energy[index] = own @ own
        largest[index] = np.abs(own).max(initial=0)
    return energy, largest, -1


def costs(
    values: Vector,
    layout: Layout,
    question: Question,
    energy: Floats,
    largest: Floats,
    relative: float,
    crew: Crew,
) -> Floats:
    """Return [bits, squared error in steps squared], both a value, of each sample at a step over rms."""
    results = np.zeros((2, len(question.wanted)))
    for k, (index, n) in enumerate(question.wanted):
        if is_coded(largest[index]):
            x = values[layout.offsets[index] : layout.offsets[index + 1]]
            results[:, k] = _cost(_sample(x, n), relative * math.sqrt(energy[index] / x.size))
    return results


def _sample(x: Vector, n: int) -> Vector:
    """Return the coefficients of a tensor's sample, each group in planar order."""
    area = n * n
    groups, runs, each = sample_shape(x.size, n)
    parts = [x[first * area : (first + each) * area] for first in run_starts(x.size, n)]
    return np.concatenate(
        [forward(np.concatenate(parts[g * runs : (g + 1) * runs]), runs * each, n) for g in range(groups)]
    )


def _cost(coefficients: Vector, step: float) -> tuple[float, float]:
    size = coefficients.size
    if size == 0:
        return 0.0, 0.0
    codes = quantise(coefficients, np.float32(1 / step), np.float32((1 - float(ROUNDING)) * step))
    error = float(np.square(coefficients.astype(np.float64) / step - codes).sum())
    places = np.flatnonzero(codes)
    gap_symbols = symbols_of(np.diff(places, prepend=-1) - 1)
    level_symbols = symbols_of(np.abs(codes[places]) - 1)
    bits = float(places.size)  # signs
    for symbols in (gap_symbols, level_symbols):
        bits += float(EXTRA[symbols].sum(dtype=np.int64))
        bits += float(COST[cheapest_table(symbols), symbols].sum(dtype=np.int64)) / COST_ONE_BIT
    return bits / size, error / size


def cut_chunks(geometry: fmt.Geometry, tiles: list[Codes]) -> list[Codes]:
    """Cut the codes of all tiles into chunks, in order."""
    chunks: list[Codes] = []
    for tile, codes in zip(geometry.tiles, tiles, strict=True):
        size = 1 << int(tile[fmt.TILE_CHUNK_LOG2])
        if tile[fmt.TILE_OFFSET]:
            chunks[-1] = np.concatenate([chunks[-1], codes])
        elif tile[fmt.TILE_CHUNK_LOG2] >= fmt.TILE_LOG2:
            chunks.append(codes)
        else:
            chunks += [codes[begin : begin + size] for begin in range(0, codes.size, size)]
    return chunks


def encode(
    values: Vector,
    headers: NDArray[np.void],
    geometry: fmt.Geometry,
    steps: Steps,
    left_over: Vector | None,
    crew: Crew,
) -> tuple[Payload | None, int]:
    """Return the stream; or None, and a tensor one of whose chunks has more codes than a header can count."""
    tiles = []
    for start, blocks, size, n, _, _, tensor, _ in geometry.tiles.tolist():
        inverse_step, threshold, magic, mantissa, scale = steps[tensor, :5]
        snapped = (values[start : start + size] + magic) - magic
        codes = quantise(forward(snapped, blocks, n), inverse_step, threshold)
        if left_over is not None:
            sent = tile_values(codes, blocks, n, mantissa, scale)
            left_over[start : start + size] = snapped - sent
        tiles.append(codes)
    chunk_headers = np.zeros(geometry.chunks, fmt.CHUNK)
    words: list[int] = []
    for chunk, codes in enumerate(cut_chunks(geometry, tiles)):
        if np.count_nonzero(cut_gaps(codes)) > fmt.MAX_NONZERO:
            return None, int(geometry.chunk_rows[chunk, fmt.CHUNK_TENSOR])
        chunk_headers[chunk], chunk_words = encode_chunk(codes)
        words += chunk_words
    own_floats = floats.encode(values, headers, geometry, left_over)
    return join(headers, geometry, chunk_headers, own_floats, np.array(words, "<u2")), -1


def decode_codes(stream: Stream) -> list[Codes]:
    """Return the codes of every tile, or raise `StreamError`."""
    geometry, chunks = stream.geometry, []
    for chunk, size in enumerate(geometry.chunk_rows[:, fmt.CHUNK_SIZE].tolist()):
        words = stream.words[stream.word_starts[chunk] : stream.word_starts[chunk + 1]]
        codes = decode_chunk(int(stream.chunks[chunk]), words, size)
        if codes is None:
            raise StreamError(f"chunk {chunk} is damaged", hint=fmt.HINT)
        chunks.append(codes)
    tiles = []
    for tile in geometry.tiles.tolist():
        first, size, chunk_log2 = tile[fmt.TILE_FIRST_CHUNK], tile[fmt.TILE_SIZE], tile[fmt.TILE_CHUNK_LOG2]
        if chunk_log2 >= fmt.TILE_LOG2:
            tiles.append(chunks[first][tile[fmt.TILE_OFFSET] : tile[fmt.TILE_OFFSET] + size])
        else:
            tiles.append(np.concatenate(chunks[first : first - (-size >> chunk_log2)]))
    return tiles


def decode(stream: Stream, out: Vector, weight: np.float32, crew: Crew) -> None:
    """Add the decoded tiles times `weight` onto `out`; touch it only if all of them are valid."""
    tiles = decode_codes(stream)
    for (start, blocks, size, n, _, _, tensor, _), codes in zip(
        stream.geometry.tiles.tolist(), tiles, strict=True
    ):
        values = tile_values(codes, blocks, n, stream.steps[tensor, MANTISSA], stream.steps[tensor, SCALE])
        changes = touched(codes, blocks, n)
        with np.errstate(over="ignore", under="ignore"):
            out[start : start + size][changes] += weight * values[changes]
