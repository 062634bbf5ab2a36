"""The Numba backend: whole buckets, tile by tile, on any number of threads.

No kernel holds the GIL. Tiles with the same block size are handed to a thread
together, so the cost of a call does not grow with the number of tensors. Scratch
memory belongs to a thread and is kept between calls.
"""

from functools import cache

import numpy as np
from numpy.typing import NDArray

from shoestring.codec.base import Vector
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
    decode_chunk,
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
from shoestring.codec.dct.sampling import lanes_of
from shoestring.codec.dct.scratch import clean_room, owned, room, run_parts
from shoestring.codec.dct.steps import Steps
from shoestring.codec.dct.tables import SYMBOLS, TABLES
from shoestring.codec.dct.transform import inverse_block, inverse_group, to_value
from shoestring.errors import StreamError

__all__ = ["costs", "decode", "encode", "scan"]

_NOTHING = np.empty(0, np.float32)
# Rows that are a power of two apart would share one cache set.
PADDING = 17
# Pairs are pushed when there are so many: few enough to be still in a near cache.
PAIRS_AT_ONCE = 1 << 15

# Stand for a block size, its area, the blocks of a group, the list of each frequency and
# kernels for it (`specialise`).
n = area = width = 0
order = np.zeros(1, np.int64)
make_lists = inverse = inverse_few = add_blocks = add_few = add_many = None


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


def _add_few(out, blocks, positions, levels, count, codes, rows, mantissa, scale, weight, y):
    """Invert the blocks that hold codes one by one."""
    row_end = 0
    f = u = 0
    for i in range(count):
        position = np.int64(positions[i])
        if position >= blocks * area:
            break
        if position >= row_end:
            f = position // blocks
            row_end = (f + 1) * blocks
            u = f // n
        b = position - row_end + blocks
        codes[b * area + f] = levels[i]
        rows[b] |= np.uint64(1) << np.uint64(u)
    for b in range(blocks):
        if rows[b]:
            block = codes[b * area : (b + 1) * area]
            target = out[b * area : (b + 1) * area]
            inverse_few(block, rows[b], y)
            for f in range(area):
                target[f] += weight * to_value(y[f], mantissa, scale)
                block[f] = 0
            rows[b] = 0


def _add_many(out, blocks, positions, levels, count, codes, rows, mantissa, scale, weight, s, values):
    """Invert group after group; blocks without codes stay untouched here too."""
    stride = blocks + PADDING
    row_end = 0
    shift = 0
    for i in range(count):
        position = np.int64(positions[i])
        if position >= blocks * area:
            break
        if position >= row_end:
            f = position // blocks
            row_end = (f + 1) * blocks
            shift = f * PADDING
        codes[position + shift] = levels[i]
        rows[position - row_end + blocks] = 1
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


def _add_8(out, blocks, positions, levels, count, codes, rows, mantissa, scale, weight, s, values):
    """Invert the blocks that hold codes one by one, in registers."""
    row_end = 0
    g = 0
    for i in range(count):
        position = np.int64(positions[i])
        if position >= blocks * 64:
            break
        if position >= row_end:
            f = position // blocks
            row_end = (f + 1) * blocks
            g = order[f]
        b = position - row_end + blocks
        codes[b * 64 + g] = levels[i]
        rows[b] = 1
    for b in range(blocks):
        if rows[b]:
            rows[b] = 0
            inverse_8(codes, b * 64, mantissa, scale, values)
            block, target = codes[b * 64 : b * 64 + 64], out[b * 64 : b * 64 + 64]
            for i in range(64):
                target[i] += weight * values[i]
                block[i] = 0


def _add_groups(out, blocks, positions, levels, count, codes, rows, mantissa, scale, weight, s, values):
    if count * FEW < out.size:
        y = s.reshape(area * width)[:area]
        add_few(out, blocks, positions, levels, count, codes, rows, mantissa, scale, weight, y)
    else:
        add_many(out, blocks, positions, levels, count, codes, rows, mantissa, scale, weight, s, values)


def _decode_tiles(
    out, tiles, starts, positions, levels, counts, codes, rows, mantissas, scales, weight, s, values
):
    for k in range(tiles.shape[0]):
        start, size, blocks = tiles[k, TILE_START], tiles[k, TILE_SIZE], tiles[k, TILE_BLOCKS]
        at, count = starts[k], counts[k]
        mantissa, scale = mantissas[tiles[k, TILE_TENSOR]], scales[tiles[k, TILE_TENSOR]]
        target = out[start : start + size]
        own, own_levels = positions[at : at + count], levels[at : at + count]
        plain = 0
        if n > 1:
            plain = blocks * area
            add_blocks(
                target, blocks, own, own_levels, count, codes, rows, mantissa, scale, weight, s, values
            )
        for i in range(np.searchsorted(own, plain), count):
            level = np.int32(own_levels[i])
            target[own[i]] += weight * to_value(level << 18, mantissa, scale)


@cache
def _decoder(n: int) -> Kernel:
    constants = {"n": n, "area": n * n, "width": lanes_of(n)}
    if n == 8:
        blocks = specialise(decode_jit, _add_8, n, order=list_order(8))
    else:
        few = specialise(decode_jit, _add_few, n, inverse_few=inverse_block(n), **constants)
        many = specialise(decode_jit, _add_many, n, inverse=inverse_group(n), **constants)
        blocks = specialise(decode_jit, _add_groups, n, add_few=few, add_many=many, **constants)
    return specialise(decode_jit, _decode_tiles, n, add_blocks=blocks, **constants)


@decode_jit
def _decode_lists(tiles, starts, words, word_starts, headers, positions, levels, counts):
    """Decode the chunks of these tiles into lists; return the first bad chunk, or -1."""
    for k in range(tiles.shape[0]):
        size = tiles[k, TILE_SIZE]
        chunk_size = np.int64(1) << tiles[k, TILE_CHUNK_LOG2]
        chunk = tiles[k, TILE_FIRST_CHUNK]
        at = starts[k]
        for begin in range(0, size, chunk_size):
            own = words[word_starts[chunk] : word_starts[chunk + 1]]
            length = min(chunk_size, size - begin)
            count = decode_chunk(own, headers[chunk], begin, length, positions[at:], levels[at:])
            if count < 0:
                return chunk
            at += count
            chunk += 1
        counts[k] = at - starts[k]
    return -1


def _inverse_room(n: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Return this thread's memory for codes and values of a group; of a block, if n is 8."""
    shape = (n * n, lanes_of(n))
    values = (64,) if n == 8 else shape
    return owned(f"inverse_{n}", lambda: (np.zeros(shape, np.int32), np.zeros(values, np.float32)))


def _split(tiles: NDArray[np.int64], threads: int) -> list[tuple[int, NDArray[np.int64]]]:
    """Group tiles by block size and cut each group into about equal parts: (n, tile numbers)."""
    parts = []
    for n in np.unique(tiles[:, TILE_SIDE]):
        chosen = np.flatnonzero(tiles[:, TILE_SIDE] == n)
        ends = np.cumsum(tiles[chosen, TILE_SIZE])
        cuts = np.searchsorted(ends, ends[-1] * np.arange(1, threads) / threads) if threads > 1 else []
        parts += [(int(n), part) for part in np.split(chosen, cuts) if part.size]
    return parts


def encode(
    values: Vector, geometry: Geometry, steps: Steps, kept: Vector | None, threads: int
) -> tuple[NDArray[np.uint32], list[NDArray[np.uint16]], int]:
    """Return the chunk headers, the words of every tile in order, and -1.

    Instead of -1: a tensor one of whose chunks has more codes than a header can count.
    """
    headers = np.zeros(geometry.chunks, CHUNK)
    words: list[NDArray[np.uint16]] = [np.empty(0, np.uint16)] * len(geometry.tiles)

    def encode_part(part: tuple[int, NDArray[np.int64]]) -> int:
        n, numbers = part
        tiles = geometry.tiles[numbers]
        sizes = tiles[:, TILE_SIZE]
        most, total = int(sizes.max()), int(sizes.sum())
        chunks = int((-(-sizes >> tiles[:, TILE_CHUNK_LOG2])).sum())
        lists = (
            room("entries", most + (PADDING + 1) * (n * n + 1), np.int64),
            room("counts", n * n + 1, np.int64),
            room("planar", most, np.int64),
        )
        pairs = PAIRS_AT_ONCE + most
        coder = (
            room("pairs", pairs, np.uint64),
            room("chunks", CHUNK_COLUMNS * chunks, np.int64)[: CHUNK_COLUMNS * chunks].reshape(chunks, -1),
            PUSHES,
            room("words", PAIR_WORDS * pairs + SPARE_WORDS * chunks, np.uint16),
            room("histograms", 4 * SYMBOLS, np.int32).reshape(4, SYMBOLS),
            room("costs", TABLES, np.int32),
        )
        out = room("out", PAIR_WORDS * total + (STATE_WORDS + PAIR_WORDS) * chunks, np.uint16)
        counts = np.zeros(len(tiles), np.int64)
        keep = kept is not None
        too_large = _encoder(n)(
            values, tiles, steps.arrays, lists, group_room(n), coder, out, counts, headers,
            keep, kept if keep else _NOTHING,
        )  # fmt: skip
        if too_large >= 0:
            return int(too_large)
        ends = np.cumsum(counts)
        written = out[: ends[-1]].copy()  # the next part overwrites `out`
        for number, end, count in zip(numbers.tolist(), ends.tolist(), counts.tolist(), strict=True):
            words[number] = written[end - count : end]
        return -1

    too_large = max(run_parts(threads, encode_part, _split(geometry.tiles, threads)), default=-1)
    return headers, words, too_large


def decode(stream: Stream, steps: Steps, out: Vector, weight: np.float32, threads: int) -> None:
    """Add the decoded tiles times `weight` onto `out`; touch it only if all of them are valid."""
    geometry = stream.geometry
    parts = _split(geometry.tiles, threads)
    total = int(geometry.tiles[:, TILE_SIZE].sum())
    positions, levels = room("list_positions", total, np.int32), room("list_levels", total, np.int16)
    counts = np.zeros(len(geometry.tiles), np.int64)
    starts = np.cumsum(geometry.tiles[:, TILE_SIZE]) - geometry.tiles[:, TILE_SIZE]

    def decode_lists(part: tuple[int, NDArray[np.int64]]) -> int:
        _, numbers = part
        own = np.zeros(len(numbers), np.int64)
        bad = _decode_lists(
            geometry.tiles[numbers], starts[numbers], stream.words, stream.word_starts, stream.chunks,
            positions, levels, own,
        )  # fmt: skip
        counts[numbers] = own
        return int(bad)

    bad = max(run_parts(threads, decode_lists, parts), default=-1)
    if bad >= 0:
        raise StreamError(f"chunk {bad} is damaged", hint=HINT)

    def add(part: tuple[int, NDArray[np.int64]]) -> None:
        n, numbers = part
        tiles = geometry.tiles[numbers]
        most, blocks = int(tiles[:, TILE_SIZE].max()), int(tiles[:, TILE_BLOCKS].max())
        _, _, _, mantissas, scales = steps.arrays
        _decoder(n)(
            out, tiles, starts[numbers], positions, levels, counts[numbers],
            clean_room("codes", most + PADDING * n * n if n > 1 else 1, np.int16),
            clean_room("rows", blocks if n > 1 else 1, np.uint64),
            mantissas, scales, weight, *_inverse_room(n),
        )  # fmt: skip

    run_parts(threads, add, parts)
