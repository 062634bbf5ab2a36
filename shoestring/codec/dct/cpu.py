"""The Numba backend: whole buckets, tile by tile, on any number of threads.

No kernel holds the GIL. Tiles with the same block size are handed to a thread
together, so the cost of a call does not grow with the number of tensors. Scratch
memory belongs to a thread and is kept between calls.
"""

from functools import cache

import numpy as np
from numpy.typing import NDArray

from shoestring.codec.base import Vector
from shoestring.codec.dct.entropy import decode_chunk, encode_chunk
from shoestring.codec.dct.format import (
    CHUNK,
    HINT,
    MAX_LEVEL,
    MAX_NONZERO,
    MAX_WORDS,
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
from shoestring.codec.dct.measure import costs, scan
from shoestring.codec.dct.sampling import lanes_of
from shoestring.codec.dct.scratch import clean_room, room, run_parts
from shoestring.codec.dct.steps import ROUNDING, Steps
from shoestring.codec.dct.tables import SYMBOLS, TABLES
from shoestring.codec.dct.transform import (
    forward_group,
    inverse_block,
    inverse_group,
    quantise,
    to_value,
    trailing_zeros,
)
from shoestring.errors import StreamError

__all__ = ["costs", "decode", "encode", "scan"]

_NOTHING = np.empty(0, np.float32)
# Rows that are a power of two apart would share one cache set.
PADDING = 17


# Stand for a block size, its area, the blocks of a group and kernels for it (`specialise`).
n = area = width = 0
transform = inverse = inverse_few = forward = keep_group = add_few = add_many = None

# Groups and tiles with more codes than one in this many values are inverted as a whole.
FEW = 24


def _keep_group(x, first, lanes, step, few, codes, rows, y, many, values, kept):
    """Write what the codes of a group leave of `x`."""
    _, _, magic, mantissa, scale = step
    if not few:
        inverse(many)
        for f in range(area):
            for b in range(width):
                values[f, b] = to_value(many[f, b], mantissa, scale)
    for b in range(lanes):
        source = x[(first + b) * area : (first + b + 1) * area]
        target = kept[(first + b) * area : (first + b + 1) * area]
        for f in range(area):
            target[f] = (source[f] + magic) - magic
        if not few:
            for f in range(area):
                target[f] -= values[f, b]
        elif rows[b]:
            block = codes[b * area : (b + 1) * area]
            inverse_few(block, rows[b], y)
            for f in range(area):
                target[f] -= to_value(y[f], mantissa, scale)
                block[f] = 0
            rows[b] = 0


def _forward(x, blocks, step, stride, positions, levels, counts, group, keep, kept):
    """Fill one list of (block, code) a frequency; the rest is the last list."""
    inverse_step, threshold, magic, mantissa, scale = step
    s, flat, flags, flag_words, codes, rows, y, many = group
    for f in range(area + 1):
        counts[f] = 0
    before = 0
    for first in range(0, blocks, width):
        lanes = min(width, blocks - first)
        transform(x, first, lanes, magic, s)
        found = 0
        few = before * FEW < lanes * area
        if few:
            for i in range(area * width):
                flags[i] = abs(flat[i]) >= threshold
            for f in range(area):
                count = counts[f]
                base = f * stride
                for w in range(f * width // 8, (f + 1) * width // 8):
                    bits = flag_words[w]
                    while bits:
                        i = w * 8 + np.int64(trailing_zeros(bits) >> np.uint64(3))
                        bits &= bits - np.uint64(1)
                        b = i - f * width
                        if b >= lanes:
                            break
                        level = quantise(flat[i], inverse_step)
                        positions[base + count] = first + b
                        levels[base + count] = level
                        count += 1
                        if keep and n > 1:
                            codes[b * area + f] = level
                            rows[b] |= np.uint64(1) << np.uint64(f // n)
                found += count - counts[f]
                counts[f] = count
        else:
            for f in range(area):
                for b in range(width):
                    c = s[f, b]
                    level = np.int32(min(abs(c) * inverse_step + ROUNDING, np.float32(MAX_LEVEL)))
                    level = max(level, np.int32(1)) if abs(c) >= threshold else np.int32(0)
                    many[f, b] = level if c > 0 else -level
            for f in range(area):
                count = counts[f]
                base = f * stride
                for b in range(lanes):  # without a branch: there is a code at every few places
                    level = many[f, b]
                    positions[base + count] = first + b
                    levels[base + count] = level
                    count += level != 0
                found += count - counts[f]
                counts[f] = count
        before = found
        if keep and n > 1:
            keep_group(x, first, lanes, step, few, codes, rows, y, many, s, kept)
    if keep and n == 1:
        for i in range(blocks):
            kept[i] = (x[i] + magic) - magic
        for i in range(counts[0]):
            kept[positions[i]] -= to_value(np.int32(levels[i]) << 18, mantissa, scale)
    count = 0
    for i in range(blocks * area, x.size):
        value = (x[i] + magic) - magic
        sent = np.float32(0)
        if abs(value) >= threshold:
            level = quantise(value, inverse_step)
            positions[area * stride + count] = i - blocks * area
            levels[area * stride + count] = level
            count += 1
            sent = to_value(level << 18, mantissa, scale)
        if keep:
            kept[i] = value - sent
    counts[area] = count


def _encode_tiles(values, tiles, steps, lists, group, coder, out, word_counts, headers, keep, kept):
    """Encode these tiles one after the other; return -1, or the tensor whose chunks are too large."""
    inverse_steps, thresholds, magics, mantissas, scales = steps
    positions, levels, counts = lists
    gaps, chunk_levels, scratch, backwards = coder
    written = 0
    for k in range(tiles.shape[0]):
        start, blocks, size = tiles[k, TILE_START], tiles[k, TILE_BLOCKS], tiles[k, TILE_SIZE]
        i = tiles[k, TILE_TENSOR]
        step = (inverse_steps[i], thresholds[i], magics[i], mantissas[i], scales[i])
        x = values[start : start + size]
        stride = blocks + PADDING
        target = kept[start : start + size] if keep else kept
        forward(x, blocks, step, stride, positions, levels, counts, group, keep, target)

        first_word = written
        chunk_size = np.int64(1) << tiles[k, TILE_CHUNK_LOG2]
        header = tiles[k, TILE_FIRST_CHUNK]
        f, at, begin = 0, 0, 0
        while begin < size:
            end = min(begin + chunk_size, size)
            count, previous = 0, begin - 1
            while f <= area:
                row = f * stride
                offset = f * blocks
                last = counts[f]
                while at < last:
                    position = offset + positions[row + at]
                    if position >= end:
                        break
                    gaps[count] = position - previous - 1
                    chunk_levels[count] = levels[row + at]
                    previous = position
                    count += 1
                    at += 1
                if at < last:
                    break
                f, at = f + 1, 0
            if count > MAX_NONZERO:
                return tiles[k, TILE_TENSOR]
            tail = end - 1 - previous
            words, head = encode_chunk(gaps, chunk_levels, count, tail, scratch, backwards, out[written:])
            headers[header] = head
            header += 1
            written += words
            begin = end
        word_counts[k] = written - first_word
    return -1


@cache
def _encoder(n: int) -> Kernel:
    constants = {"n": n, "area": n * n, "width": lanes_of(n)}
    keeper = specialise(
        encode_jit, _keep_group, n, inverse=inverse_group(n), inverse_few=inverse_block(n), **constants
    )
    lister = specialise(encode_jit, _forward, n, transform=forward_group(n), keep_group=keeper, **constants)
    return specialise(encode_jit, _encode_tiles, n, forward=lister, **constants)


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


def _decode_tiles(out, tiles, starts, positions, levels, counts, codes, rows, mantissas, scales, weight):
    y = np.empty(area, np.int32)
    s = np.zeros((area, width), np.int32)
    values = np.zeros((area, width), np.float32)
    for k in range(tiles.shape[0]):
        start, size, blocks = tiles[k, TILE_START], tiles[k, TILE_SIZE], tiles[k, TILE_BLOCKS]
        at, count = starts[k], counts[k]
        mantissa, scale = mantissas[tiles[k, TILE_TENSOR]], scales[tiles[k, TILE_TENSOR]]
        target = out[start : start + size]
        own_positions, own_levels = positions[at : at + count], levels[at : at + count]
        plain = 0
        if n > 1:
            plain = blocks * area
            if count * FEW < size:
                add_few(
                    target, blocks, own_positions, own_levels, count, codes, rows, mantissa, scale, weight, y
                )
            else:
                add_many(
                    target,
                    blocks,
                    own_positions,
                    own_levels,
                    count,
                    codes,
                    rows,
                    mantissa,
                    scale,
                    weight,
                    s,
                    values,
                )
        for i in range(np.searchsorted(own_positions, plain), count):
            level = np.int32(own_levels[i])
            target[own_positions[i]] += weight * to_value(level << 18, mantissa, scale)


@cache
def _decoder(n: int) -> Kernel:
    constants = {"n": n, "area": n * n, "width": lanes_of(n)}
    few = specialise(decode_jit, _add_few, n, inverse_few=inverse_block(n), **constants)
    many = specialise(decode_jit, _add_many, n, inverse=inverse_group(n), **constants)
    return specialise(decode_jit, _decode_tiles, n, add_few=few, add_many=many, **constants)


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
        area, width = n * n, lanes_of(n)
        most = int(tiles[:, TILE_SIZE].max())
        listed = most + PADDING * area + area
        lists = (
            room("positions", listed, np.int32),
            room("levels", listed, np.int16),
            room("counts", area + 1, np.int64),
        )
        s = np.zeros((area, width), np.float32)
        flags = np.zeros(area * width, np.uint8)
        group = (
            s,
            s.reshape(-1),
            flags,
            flags.view(np.uint64),
            np.zeros(area * width, np.int16),
            np.zeros(width, np.uint64),
            np.empty(area, np.int32),
            np.zeros((area, width), np.int32),
        )
        symbols = room("symbols", 2 * most, np.uint8)[: 2 * most].reshape(2, most)
        coder = (
            room("gaps", most, np.int32),
            room("chunk_levels", most, np.int16),
            (symbols, np.zeros((4, SYMBOLS), np.int32), np.zeros(TABLES, np.int32)),
            room("backwards", min(4 * most, MAX_WORDS) + 8, np.uint16),
        )
        total = int(tiles[:, TILE_SIZE].sum())
        chunks = total // 1024 + tiles.shape[0]
        out = room("out", 4 * total + STATE_WORDS * chunks, np.uint16)
        counts = np.zeros(len(tiles), np.int64)
        keep = kept is not None
        too_large = _encoder(n)(
            values,
            tiles,
            steps.arrays,
            lists,
            group,
            coder,
            out,
            counts,
            headers,
            keep,
            kept if keep else _NOTHING,
        )
        if too_large >= 0:
            return int(too_large)
        ends = np.cumsum(counts)
        for number, end, count in zip(numbers, ends, counts, strict=True):
            words[number] = out[end - count : end].copy()
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
            mantissas, scales, weight,
        )  # fmt: skip

    run_parts(threads, add, parts)
