"""The Numba backend: whole buckets, tile by tile, on any number of threads.

No kernel holds the GIL. Tiles with the same block size are handed to a thread
together, so the cost of a call does not grow with the number of tensors. Scratch
memory belongs to a thread and is kept between calls.
"""

from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np
from numpy.typing import NDArray

from shoestring.codec.base import Vector
from shoestring.codec.dct import pull
from shoestring.codec.dct.entropy import (
    CHUNK_COLUMNS,
    END,
    FIRST,
    NUMBER,
    PAIR_WORDS,
    PAIRS,
    PUSHES,
    SPARE_WORDS,
    TAIL,
    TILE,
    choose_tables,
    pack_pairs,
    push_chunks,
    write_chunk,
)
from shoestring.codec.dct.format import (
    CHUNK,
    HINT,
    MAX_NONZERO,
    STATE_WORDS,
    TILE_BLOCKS,
    TILE_CHUNK_LOG2,
    TILE_FIRST_CHUNK,
    TILE_SIDE,
    TILE_SIZE,
    TILE_START,
    TILE_TENSOR,
    Geometry,
    Stream,
)
from shoestring.codec.dct.jit import Kernel, decode_jit, encode_jit, specialise
from shoestring.codec.dct.lanes import inverse_8
from shoestring.codec.dct.lists import FEW, group_room, list_order, lister
from shoestring.codec.dct.measure import costs, scan
from shoestring.codec.dct.plan import CHUNK_BITS
from shoestring.codec.dct.sampling import lanes_of
from shoestring.codec.dct.steps import Steps
from shoestring.codec.dct.tables import SLOT, SYMBOLS, TABLES
from shoestring.codec.dct.transform import inverse_block, inverse_group, to_value
from shoestring.codec.scratch import balance, clean_room, owned, room, run_parts
from shoestring.errors import StreamError

__all__ = ["costs", "decode", "encode", "scan"]

_NOTHING = np.empty(0, np.float32)
# Rows that are a power of two apart would share one cache set.
PADDING = 17
# Pairs are pushed when there are so many: few enough to be still in a near cache.
PAIRS_AT_ONCE = 1 << 15
_WORTH_A_THREAD = 300_000  # nanoseconds of work: to wake a thread takes some 50,000

# Stand for a block size, its area, the blocks of a group, the list of each frequency and
# kernels for it (`specialise`).
n = area = width = 0
order = np.zeros(1, np.int64)
make_lists = inverse = inverse_few = scatter = scatter_planar = add_few = add_many = None


@decode_jit
def _flush(pairs, chunks, infos, words, out, written, word_counts, headers):
    """Push all chunks that wait and write them; return how many words are written by then."""
    push_chunks(pairs, chunks, infos, words)
    for c in range(chunks.shape[0]):
        count, headers[chunks[c, NUMBER]] = write_chunk(chunks[c], words, out[written:])
        word_counts[chunks[c, TILE]] += count
        written += count
    return written


def _encode_tiles(values, tiles, steps, lists, group, coder, out, word_counts, headers, keep, kept):
    """Encode these tiles one after the other; return -1, or the tensor whose chunks are too large."""
    inverse_steps, thresholds, magics, mantissas, scales = steps
    entries, counts, planar = lists
    pairs, chunks, infos, words, histograms, costs = coder
    halves = pairs.view(np.uint16)
    written = waiting = count = 0
    for k in range(tiles.shape[0]):
        start, blocks, size = tiles[k, TILE_START], tiles[k, TILE_BLOCKS], tiles[k, TILE_SIZE]
        i = tiles[k, TILE_TENSOR]
        step = (inverse_steps[i], thresholds[i], magics[i], mantissas[i], scales[i])
        stride = blocks + PADDING
        target = kept[start : start + size] if keep else kept
        make_lists(values[start : start + size], blocks, step, stride, entries, counts, group, keep, target)

        total = 0
        for f in range(area + 1):
            row = entries[order[f] * stride : order[f] * stride + counts[order[f]]]
            for j in range(row.size):
                planar[total + j] = row[j] + (f * blocks << 16)
            total += row.size

        chunk_size = np.int64(1) << tiles[k, TILE_CHUNK_LOG2]
        number = tiles[k, TILE_FIRST_CHUNK]
        at = 0
        for begin in range(0, size, chunk_size):
            end = min(begin + chunk_size, size)
            own = planar[at : at + np.searchsorted(planar[at:total], end << 16)]
            at += own.size
            if own.size > MAX_NONZERO:
                return i
            if own.size:
                chunk = chunks[waiting]
                chunk[NUMBER], chunk[TILE], chunk[FIRST], chunk[PAIRS] = number, k, count, own.size
                chunk[TAIL] = end - 1 - (own[-1] >> 16)
                waiting += 1
                count += own.size
                chunk[END] = PAIR_WORDS * count + SPARE_WORDS * waiting
                packed = pairs[count - own.size : count]
                pack_pairs(own, begin, packed)
                choose_tables(chunk, packed, histograms, costs)
            number += 1
        if count >= PAIRS_AT_ONCE or k == tiles.shape[0] - 1:
            written = _flush(halves, chunks[:waiting], infos, words, out, written, word_counts, headers)
            waiting = count = 0
    return -1


@cache
def _encoder(n: int) -> Kernel:
    return specialise(encode_jit, _encode_tiles, n, area=n * n, order=list_order(n), make_lists=lister(n))


@decode_jit
def _code(entry):
    """Return the code of an entry (`lists.py`)."""
    magnitude = np.int32((entry & 0xFFFF) >> 1) + np.int32(1)
    return np.int32(-magnitude if entry & 1 else magnitude)


@decode_jit
def _add_rest(out, entries, mantissa, scale, weight):
    for entry in entries:
        out[entry >> 16] += weight * to_value(_code(entry) << 18, mantissa, scale)


def _scatter(entries, blocks, codes, rows):
    """Write codes block after block, and to `rows` which rows of a block have any."""
    row_end = g = u = 0
    for entry in entries:
        position = entry >> 16
        if position >= row_end:
            f = position // blocks
            row_end = (f + 1) * blocks
            g, u = order[f], f // n
        b = position - row_end + blocks
        codes[b * area + g] = _code(entry)
        rows[b] |= np.uint64(1) << np.uint64(u)


def _add_few(out, blocks, codes, rows, mantissa, scale, weight, s, values):
    """Invert the blocks that hold codes one by one."""
    y = s.reshape(area * width)[:area]
    for b in range(blocks):
        if rows[b]:
            block = codes[b * area : (b + 1) * area]
            target = out[b * area : (b + 1) * area]
            inverse_few(block, rows[b], y)
            for f in range(area):
                target[f] += weight * to_value(y[f], mantissa, scale)
                block[f] = 0
            rows[b] = 0


def _add_8(out, blocks, codes, rows, mantissa, scale, weight, s, values):
    """Do the same in registers."""
    for b in range(blocks):
        if rows[b]:
            rows[b] = 0
            inverse_8(codes, b * 64, mantissa, scale, values)
            block, target = codes[b * 64 : b * 64 + 64], out[b * 64 : b * 64 + 64]
            for i in range(64):
                target[i] += weight * values[i]
                block[i] = 0


def _scatter_planar(entries, blocks, codes, rows):
    row_end = shift = 0
    for entry in entries:
        position = entry >> 16
        if position >= row_end:
            f = position // blocks
            row_end = (f + 1) * blocks
            shift = f * PADDING
        codes[position + shift] = _code(entry)
        rows[position - row_end + blocks] = 1


def _add_many(out, blocks, codes, rows, mantissa, scale, weight, s, values):
    """Invert group after group; blocks without codes stay untouched here too."""
    stride = blocks + PADDING
    for first in range(0, blocks, width):
        lanes = min(width, blocks - first)
        for f in range(area):
            row = codes[f * stride + first : f * stride + first + lanes]
            for b in range(lanes):
                s[f, b] = row[b]
                row[b] = 0
        inverse(s)
        for f in range(area):
            for b in range(width):
                values[f, b] = weight * to_value(s[f, b], mantissa, scale)
        for b in range(lanes):
            if rows[first + b]:
                rows[first + b] = 0
                target = out[(first + b) * area : (first + b + 1) * area]
                for f in range(area):
                    target[f] += values[f, b]


def _add_tiles(out, tiles, starts, entries, counts, codes, rows, mantissas, scales, weight, s, values):
    """Add the decoded tiles; `codes` and `rows` are zero before and after each."""
    for k in range(tiles.shape[0]):
        start, size, blocks = tiles[k, TILE_START], tiles[k, TILE_SIZE], tiles[k, TILE_BLOCKS]
        first, chunk_log2 = tiles[k, TILE_FIRST_CHUNK], tiles[k, TILE_CHUNK_LOG2]
        mantissa, scale = mantissas[tiles[k, TILE_TENSOR]], scales[tiles[k, TILE_TENSOR]]
        target = out[start : start + size]
        own_counts = counts[first : first + ((size - 1) >> chunk_log2) + 1]
        plain = blocks * area if n > 1 else 0
        many = n != 8 and own_counts.sum() * FEW >= size
        for c in range(own_counts.size):
            at = starts[k] + (c << chunk_log2)
            own = entries[at : at + own_counts[c]]
            cut = own.size
            if cut and own[-1] >> 16 >= plain:
                cut = np.searchsorted(own, plain << 16)
                _add_rest(target, own[cut:], mantissa, scale, weight)
            if n > 1:
                if many:
                    scatter_planar(own[:cut], blocks, codes, rows)
                else:
                    scatter(own[:cut], blocks, codes, rows)
        if n > 1 and many:
            add_many(target, blocks, codes, rows, mantissa, scale, weight, s, values)
        elif n > 1:
            add_few(target, blocks, codes, rows, mantissa, scale, weight, s, values)


@cache
def _adder(n: int) -> Kernel:
    constants = {"n": n, "area": n * n, "width": lanes_of(n), "order": list_order(n)}
    if n == 8:
        few = many = specialise(decode_jit, _add_8, n)
    else:
        few = specialise(decode_jit, _add_few, n, inverse_few=inverse_block(n), **constants)
        many = specialise(decode_jit, _add_many, n, inverse=inverse_group(n), **constants)
    scatters = {
        "scatter": specialise(decode_jit, _scatter, n, **constants),
        "scatter_planar": specialise(decode_jit, _scatter_planar, n, **constants),
    }
    return specialise(decode_jit, _add_tiles, n, add_few=few, add_many=many, **scatters, **constants)


@decode_jit
def _decode_tiles(tiles, starts, words, word_starts, headers, slots, infos, entries, counts):
    """Decode the chunks of these tiles, each to where its codes would be; return -1 or a bad one."""
    total = 0
    for k in range(tiles.shape[0]):
        total += ((tiles[k, TILE_SIZE] - 1) >> tiles[k, TILE_CHUNK_LOG2]) + 1
    chunks = np.empty((total, 4), np.int64)
    at = 0
    for k in range(tiles.shape[0]):
        size, chunk_size = tiles[k, TILE_SIZE], np.int64(1) << tiles[k, TILE_CHUNK_LOG2]
        number = tiles[k, TILE_FIRST_CHUNK]
        for begin in range(0, size, chunk_size):
            chunks[at, pull.NUMBER], chunks[at, pull.BEGIN] = number, begin
            chunks[at, pull.SIZE], chunks[at, pull.OUT] = min(chunk_size, size - begin), starts[k] + begin
            number += 1
            at += 1
    return pull.pull_chunks(chunks, words, word_starts, headers, slots, infos, entries, counts)


def _inverse_room(n: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Return this thread's memory for codes and values of a group; of a block, if n is 8."""
    shape = (n * n, lanes_of(n))
    values = (64,) if n == 8 else shape
    return owned(f"inverse_{n}", lambda: (np.zeros(shape, np.int32), np.zeros(values, np.float32)))


@dataclass(frozen=True)
class _Part:
    """Tiles of one block size that a thread codes, and how much memory that takes."""

    n: int
    numbers: NDArray[np.int64]
    tiles: NDArray[np.int64]
    starts: NDArray[np.int64]  # of each tile, if all tiles lay end to end
    most: int  # values of a tile
    blocks: int  # of a tile
    total: int  # values
    chunks: int


@lru_cache(maxsize=256)
def _deal(geometry: Geometry, threads: int, decoding: bool = False) -> list[list[_Part]]:
    """Say which thread codes which tiles; fewer threads than allowed where they would not pay."""
    tiles = geometry.tiles
    # About how many nanoseconds a value takes, and a bit; chunks have about as many bits each.
    value = np.where(tiles[:, TILE_SIDE] == 1, 0.1, np.where(tiles[:, TILE_SIDE] == 8, 0.3, 1.0))
    bits = CHUNK_BITS / (1 << tiles[:, TILE_CHUNK_LOG2])
    weights = tiles[:, TILE_SIZE] * (value + 2 * bits)
    if decoding:
        weights = tiles[:, TILE_SIZE] * (value * (tiles[:, TILE_SIDE] > 1) + 1.5 * bits)
    threads = min(threads, 1 + int(weights.sum() / _WORTH_A_THREAD))
    chunks = -(-tiles[:, TILE_SIZE] >> tiles[:, TILE_CHUNK_LOG2])
    starts = np.cumsum(tiles[:, TILE_SIZE]) - tiles[:, TILE_SIZE]
    parts = []
    for dealt in balance(weights.tolist(), threads):
        part = []
        for n in np.unique(tiles[dealt, TILE_SIDE]).tolist():
            own = np.array([k for k in dealt if tiles[k, TILE_SIDE] == n])
            sizes, blocks = tiles[own, TILE_SIZE], tiles[own, TILE_BLOCKS]
            most, total = int(sizes.max()), int(sizes.sum())
            part.append(
                _Part(n, own, tiles[own], starts[own], most, int(blocks.max()), total, int(chunks[own].sum()))
            )
        parts.append(part)
    return parts


def encode(
    values: Vector, geometry: Geometry, steps: Steps, kept: Vector | None, threads: int
) -> tuple[NDArray[np.uint32], list[NDArray[np.uint16]], int]:
    """Return the chunk headers, the words of every tile in order, and -1.

    Instead of -1: a tensor one of whose chunks has more codes than a header can count.
    """
    headers = np.zeros(geometry.chunks, CHUNK)
    words: list[NDArray[np.uint16]] = [np.empty(0, np.uint16)] * len(geometry.tiles)

    def encode_part(part: _Part) -> int:
        n, chunks = part.n, part.chunks
        lists = (
            room("entries", part.most + (PADDING + 1) * (n * n + 1), np.int64),
            room("counts", n * n + 1, np.int64),
            room("planar", part.most, np.int64),
        )
        pairs = PAIRS_AT_ONCE + part.most
        coder = (
            room("pairs", pairs, np.uint64),
            room("chunks", CHUNK_COLUMNS * chunks, np.int64)[: CHUNK_COLUMNS * chunks].reshape(chunks, -1),
            PUSHES,
            room("words", PAIR_WORDS * pairs + SPARE_WORDS * chunks, np.uint16),
            room("histograms", 4 * SYMBOLS, np.int32).reshape(4, SYMBOLS),
            room("costs", TABLES, np.int32),
        )
        out = room("out", PAIR_WORDS * part.total + (STATE_WORDS + PAIR_WORDS) * chunks, np.uint16)
        counts = np.zeros(len(part.tiles), np.int64)
        too_large: int = _encoder(n)(
            values, part.tiles, steps.arrays, lists, group_room(n), coder, out, counts, headers,
            kept is not None, _NOTHING if kept is None else kept,
        )  # fmt: skip
        if too_large >= 0:
            return too_large
        ends = np.cumsum(counts)
        written = out[: ends[-1]].copy()  # the next part overwrites `out`
        for number, end, count in zip(part.numbers.tolist(), ends.tolist(), counts.tolist(), strict=True):
            words[number] = written[end - count : end]
        return -1

    def encode_parts(parts: list[_Part]) -> int:
        return max(encode_part(part) for part in parts)

    too_large = max(run_parts(threads, encode_parts, _deal(geometry, threads)), default=-1)
    return headers, words, too_large


def decode(stream: Stream, steps: Steps, out: Vector, weight: np.float32, threads: int) -> None:
    """Add the decoded tiles times `weight` onto `out`; touch it only if all of them are valid."""
    geometry = stream.geometry
    entries = room("entries", int(geometry.tiles[:, TILE_SIZE].sum()), np.int64)
    counts = np.empty(geometry.chunks, np.int64)

    def decode_parts(parts: list[_Part]) -> int:
        bad: int = -1
        for part in parts:
            found = _decode_tiles(
                part.tiles, part.starts, stream.words, stream.word_starts, stream.chunks,
                SLOT, pull.PULLS, entries, counts,
            )  # fmt: skip
            bad = max(bad, found)
        return bad

    def add_parts(parts: list[_Part]) -> None:
        _, _, _, mantissas, scales = steps.arrays
        for part in parts:
            n = part.n
            _adder(n)(
                out, part.tiles, part.starts, entries, counts,
                clean_room("codes", part.most + PADDING * n * n if n > 1 else 1, np.int16),
                clean_room("rows", part.blocks if n > 1 else 1, np.uint64),
                mantissas, scales, weight, *_inverse_room(n),
            )  # fmt: skip

    dealt = _deal(geometry, threads, decoding=True)
    bad = max(run_parts(threads, decode_parts, dealt), default=-1)
    if bad >= 0:
        raise StreamError(f"chunk {bad} is damaged", hint=HINT)
    run_parts(threads, add_parts, dealt)
