"""The Numba backend: whole buckets, tile by tile, on any number of threads.

No kernel holds the GIL. Tiles with the same block size are handed to a thread
together, so the cost of a call does not grow with the number of tensors. Scratch
memory belongs to a thread and is kept between calls.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoestring.codec.base import Vector
from shoestring.codec.dct.entropy import decode_chunk, encode_chunk
from shoestring.codec.dct.format import (
    CHUNK,
    HINT,
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
from shoestring.codec.dct.jit import decode_jit, encode_jit
from shoestring.codec.dct.measure import Sample, scan
from shoestring.codec.dct.scratch import clean_room, room
from shoestring.codec.dct.steps import Steps
from shoestring.codec.dct.tables import SYMBOLS, TABLES
from shoestring.codec.dct.transform import (
    forward_group,
    inverse_block,
    lanes_of,
    quantise,
    to_value,
    trailing_zeros,
)
from shoestring.errors import StreamError

__all__ = ["Sample", "decode", "encode", "scan"]

_NOTHING = np.empty(0, np.float32)


@cache
def _forward_tile(n: int) -> Callable[..., Any]:
    area = n * n
    width = lanes_of(n)
    transform = forward_group(n)
    inverse = inverse_block(n)

    @encode_jit
    def keep_group(x, first, lanes, magic, mantissa, scale, codes, rows, columns, t, y, kept):
        for b in range(lanes):
            source = x[(first + b) * area : (first + b + 1) * area]
            target = kept[(first + b) * area : (first + b + 1) * area]
            for f in range(area):
                target[f] = (source[f] + magic) - magic
            if rows[b]:
                block = codes[b * area : (b + 1) * area]
                inverse(block, rows[b], columns[b], t, y)
                for f in range(area):
                    target[f] -= to_value(y[f], mantissa, scale)
                    block[f] = 0
                rows[b] = 0
                columns[b] = 0

    @encode_jit
    def forward(x, blocks, step, stride, positions, levels, counts, group, keep, kept):
        """Fill one list of (block, code) a frequency; the rest is the last list."""
        inverse_step, threshold, magic, mantissa, scale = step
        s, flat, flags, flag_words, codes, rows, columns, t, y = group
        for f in range(area + 1):
            counts[f] = 0
        for first in range(0, blocks, width):
            lanes = min(width, blocks - first)
            transform(x, first, lanes, magic, s)
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
                        if keep:
                            codes[b * area + f] = level
                            rows[b] |= np.uint64(1) << np.uint64(f // n)
                            columns[b] |= np.uint64(1) << np.uint64(f % n)
                counts[f] = count
            if keep:
                keep_group(x, first, lanes, magic, mantissa, scale, codes, rows, columns, t, y, kept)
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

    @encode_jit
    def encode(values, tiles, steps, lists, group, coder, out, word_counts, headers, keep, kept):
        """Encode these tiles one after the other; return -1, or the tensor whose chunks are too large."""
        inverse_steps, thresholds, magics, mantissas, scales = steps
        positions, levels, counts = lists
        gaps, chunk_levels, scratch, backwards = coder
        written = 0
        for k in range(tiles.shape[0]):
            start, blocks, size = tiles[k, TILE_START], tiles[k, TILE_BLOCKS], tiles[k, TILE_SIZE]
            tensor = tiles[k, TILE_TENSOR]
            step = (
                inverse_steps[tensor],
                thresholds[tensor],
                magics[tensor],
                mantissas[tensor],
                scales[tensor],
            )
            x = values[start : start + size]
            stride = blocks + 17  # rows that are a power of two apart would share one cache set
            target = kept[start : start + size] if keep else kept
            forward(x, blocks, step, stride, positions, levels, counts, group, keep, target)

            first_word = written
            chunk_size = np.int64(1) << tiles[k, TILE_CHUNK_LOG2]
            header = tiles[k, TILE_FIRST_CHUNK]
            f, i, begin = 0, 0, 0
            while begin < size:
                end = min(begin + chunk_size, size)
                count, previous = 0, begin - 1
                while f <= area:
                    if i == counts[f]:
                        f, i = f + 1, 0
                        continue
                    position = f * blocks + positions[f * stride + i]
                    if f == area:
                        position = area * blocks + positions[f * stride + i]
                    if position >= end:
                        break
                    gaps[count] = position - previous - 1
                    chunk_levels[count] = levels[f * stride + i]
                    previous = position
                    count += 1
                    i += 1
                if count > MAX_NONZERO:
                    return tensor
                tail = end - 1 - previous
                words, head = encode_chunk(gaps, chunk_levels, count, tail, scratch, backwards, out[written:])
                headers[header] = head
                header += 1
                written += words
                begin = end
            word_counts[k] = written - first_word
        return -1

    return encode


@cache
def _inverse_tile(n: int) -> Callable[..., Any]:
    area = n * n
    inverse = inverse_block(n)

    @decode_jit
    def add(out, blocks, positions, levels, count, codes, rows, columns, mantissa, scale, weight, t, y):
        end = blocks * area
        f, row_end = 0, blocks
        u, v = 0, 0
        for i in range(count):
            position = np.int64(positions[i])
            level = np.int32(levels[i])
            if n == 1 or position >= end:
                out[position] += weight * to_value(level << 18, mantissa, scale)
                continue
            if position >= row_end:
                f = position // blocks
                row_end = (f + 1) * blocks
                u, v = f // n, f % n
            b = position - row_end + blocks
            codes[b * area + f] = level
            rows[b] |= np.uint64(1) << np.uint64(u)
            columns[b] |= np.uint64(1) << np.uint64(v)
        if n == 1:
            return
        for b in range(blocks):
            if rows[b]:
                block = codes[b * area : (b + 1) * area]
                target = out[b * area : (b + 1) * area]
                inverse(block, rows[b], columns[b], t, y)
                for f in range(area):
                    target[f] += weight * to_value(y[f], mantissa, scale)
                    block[f] = 0
                rows[b] = 0
                columns[b] = 0

    @decode_jit
    def decode(
        out, tiles, starts, positions, levels, counts, codes, rows, columns, mantissas, scales, weight
    ):
        t = np.empty(area, np.int32)
        y = np.empty(area, np.int32)
        for k in range(tiles.shape[0]):
            start, size, tensor = tiles[k, TILE_START], tiles[k, TILE_SIZE], tiles[k, TILE_TENSOR]
            at = starts[k]
            add(
                out[start : start + size],
                tiles[k, TILE_BLOCKS],
                positions[at:],
                levels[at:],
                counts[k],
                codes,
                rows,
                columns,
                mantissas[tensor],
                scales[tensor],
                weight,
                t,
                y,
            )

    return decode


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
            count = decode_chunk(own, headers[chunk], length, positions[at:], levels[at:])
            if count < 0:
                return chunk
            for i in range(at, at + count):
                positions[i] += begin
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


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="shoestring-codec")


def _run(threads: int, function: Callable[..., Any], parts: Sequence[Any]) -> list[Any]:
    if threads == 1 or len(parts) <= 1:
        return [function(part) for part in parts]
    return list(_pool(threads).map(function, parts))


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
        listed = most + 17 * area + area
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
            np.zeros(width, np.uint64),
            np.empty(area, np.int32),
            np.empty(area, np.int32),
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
        too_large = _forward_tile(n)(
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

    too_large = max(_run(threads, encode_part, _split(geometry.tiles, threads)), default=-1)
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

    bad = max(_run(threads, decode_lists, parts), default=-1)
    if bad >= 0:
        raise StreamError(f"chunk {bad} is damaged", hint=HINT)

    def add(part: tuple[int, NDArray[np.int64]]) -> None:
        n, numbers = part
        tiles = geometry.tiles[numbers]
        most, blocks = int(tiles[:, TILE_SIZE].max()), int(tiles[:, TILE_BLOCKS].max())
        _, _, _, mantissas, scales = steps.arrays
        _inverse_tile(n)(
            out, tiles, starts[numbers], positions, levels, counts[numbers],
            clean_room("codes", most if n > 1 else 1, np.int16),
            clean_room("rows", blocks if n > 1 else 1, np.uint64),
            clean_room("columns", blocks if n > 1 else 1, np.uint64),
            mantissas, scales, weight,
        )  # fmt: skip

    _run(threads, add, parts)
