"""The Numba backend: whole buckets, tile by tile, on any number of threads.

No kernel holds the GIL. Tiles with the same block size are handed to a thread
together, so the cost of a call does not grow with the number of tensors. Scratch
memory belongs to a thread and stays between calls.
"""

from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np
from numpy.typing import NDArray

from shoestring.codec.base import Payload, Vector
from shoestring.codec.dct import floats
from shoestring.codec.dct import format as fmt
from shoestring.codec.dct.choice import Chunking
from shoestring.codec.dct.cpu import decoder
from shoestring.codec.dct.cpu.adder import adder, inverse_room
from shoestring.codec.dct.cpu.encoder import (
    BEGIN,
    CHUNK_COLUMNS,
    ENCODING,
    END,
    FIRST,
    NUMBER,
    PAIR_WORDS,
    PAIRS,
    SPARE_WORDS,
    TAIL,
    choose_tables,
    encode_chunks,
    pack_pairs,
    write_chunk,
)
from shoestring.codec.dct.cpu.lists import PADDING, group_room, list_order, lister
from shoestring.codec.dct.cpu.measure import costs, scan
from shoestring.codec.dct.steps import INVERSE, MAGIC, MANTISSA, SCALE, THRESHOLD, Steps
from shoestring.codec.dct.stream import Stream, new_payload
from shoestring.codec.dct.tables import SLOT, SYMBOLS, TABLES
from shoestring.compiled.crew import Crew
from shoestring.compiled.jit import Kernel, copy, decode_jit, encode_jit, making_jit, specialise
from shoestring.compiled.scratch import clean_room, room
from shoestring.compiled.turns import Turns, new_turns, take_turn, take_turns
from shoestring.errors import StreamError

__all__ = ["CHUNKING", "costs", "decode", "encode", "scan"]

_NOTHING = np.empty(0, np.float32)
# Pairs are encoded when there are this many: few enough to be still in a near cache.
PAIRS_AT_ONCE = 1 << 15
_WORTH_A_THREAD = 300_000  # nanoseconds of work: to wake a thread takes some 50,000
CHUNKING = Chunking(bits=8192, most_log2=fmt.MAX_CHUNK_LOG2)

# Placeholders, which `specialise` replaces: a block's area, the list of each frequency, the lister.
area = 0
order = np.zeros(1, np.int64)
make_lists = None


@decode_jit
def _flush(pairs, chunks, infos, words, out, written, places, headers):
    """Encode all waiting chunks; append their words to `out`, which all threads share."""
    encode_chunks(pairs, chunks, infos, words)
    for c in range(chunks.shape[0]):
        number = chunks[c, NUMBER]
        at = take_turns(written, chunks[c, END] - chunks[c, BEGIN] + fmt.STATE_WORDS)
        places[number], headers[number] = at, write_chunk(chunks[c], words, out[at:])


@decode_jit
def _cut_gaps(entries, count, size):
    """Cut gaps that are too long by entries of level `NO_CODE`; return the number of entries.

    They go to the end of a gap that is as long as one may be.
    """
    more, previous = 0, -1
    for i in range(count):
        position = entries[i] >> 16
        more += (position - previous - 1) // (fmt.MAX_GAP + 1)
        previous = position
    more_behind = (size - 1 - previous) // (fmt.MAX_GAP + 1) if count else 0
    target = count + more
    for k in range(more_behind):
        entries[target + k] = previous + (k + 1) * (fmt.MAX_GAP + 1) << 16 | fmt.NO_CODE - 1 << 1
    for i in range(count - 1, -1, -1):
        if target == i + 1:
            break
        position, previous = entries[i] >> 16, entries[i - 1] >> 16 if i else -1
        target -= 1
        entries[target] = entries[i]
        for k in range((position - previous - 1) // (fmt.MAX_GAP + 1), 0, -1):
            target -= 1
            entries[target] = previous + k * (fmt.MAX_GAP + 1) << 16 | fmt.NO_CODE - 1 << 1
    return count + more + more_behind


def _encode_tiles(
    values, tiles, units, turns, steps, lists, group, coder, out, written, places, headers, left_over
):
    """Take tiles, or those that share a chunk, and encode them.

    Returns -1, or the tensor whose chunks are too large.
    """
    entries, counts, planar = lists
    pairs, chunks, infos, words, histograms, costs = coder
    halves = pairs.view(np.uint16)
    waiting = count = 0
    while True:
        k = take_turn(turns)
        if k >= units.size - 1:
            break
        total = offset = size = 0
        for j in range(units[k], units[k + 1]):
            tile = tiles[j]
            start, blocks, size, offset = (
                tile[fmt.TILE_START],
                tile[fmt.TILE_BLOCKS],
                tile[fmt.TILE_SIZE],
                tile[fmt.TILE_OFFSET],
            )
            own_step = steps[tile[fmt.TILE_TENSOR]]
            mantissa, scale = np.int32(own_step[MANTISSA]), own_step[SCALE]
            step = (own_step[INVERSE], own_step[THRESHOLD], own_step[MAGIC], mantissa, scale)
            stride = blocks + PADDING
            x, target = values[start : start + size], left_over[start : start + size]
            make_lists(x, blocks, step, stride, entries, counts, group, target)
            for f in range(area + 1):
                row = entries[order[f] * stride : order[f] * stride + counts[order[f]]]
                for i in range(row.size):
                    planar[total + i] = row[i] + (offset + f * blocks << 16)
                total += row.size
            if tile[fmt.TILE_CHUNK_LOG2] >= fmt.TILE_LOG2 and total > fmt.MAX_NONZERO:
                return tile[fmt.TILE_TENSOR]

        tile = tiles[units[k + 1] - 1]
        number, all_end, chunk_size = (
            tile[fmt.TILE_FIRST_CHUNK],
            offset + size,
            np.int64(1) << tile[fmt.TILE_CHUNK_LOG2],
        )
        if tile[fmt.TILE_CHUNK_LOG2] >= fmt.TILE_LOG2:
            total, chunk_size = _cut_gaps(planar, total, all_end), all_end
        at = 0
        for begin in range(0, all_end, chunk_size):
            end = min(begin + chunk_size, all_end)
            own = planar[at : at + np.searchsorted(planar[at:total], end << 16)]
            at += own.size
            if own.size > fmt.MAX_NONZERO:
                return tile[fmt.TILE_TENSOR]
            if own.size:
                chunk = chunks[waiting]
                chunk[NUMBER], chunk[FIRST], chunk[PAIRS] = number, count, own.size
                chunk[TAIL] = end - 1 - (own[-1] >> 16)
                waiting += 1
                count += own.size
                chunk[END] = PAIR_WORDS * count + SPARE_WORDS * waiting
                packed = pairs[count - own.size : count]
                pack_pairs(own, begin, packed)
                choose_tables(chunk, packed, histograms, costs)
            number += 1
        if count >= PAIRS_AT_ONCE:
            _flush(halves, chunks[:waiting], infos, words, out, written, places, headers)
            waiting = count = 0
    _flush(halves, chunks[:waiting], infos, words, out, written, places, headers)
    return np.int64(-1)


@cache
def _encoder(n: int) -> Kernel:
    return specialise(encode_jit, _encode_tiles, n, area=n * n, order=list_order(n), make_lists=lister(n))


@decode_jit
def _gather(headers, places, out, chunks, words):
    """Write the headers and words of all chunks in order."""
    at = 0
    for c in range(places.size):
        chunks[c] = headers[c]
        count = np.int64(headers[c] & fmt.MAX_WORDS)
        copy(out, places[c], words, at, count)
        at += count


@making_jit
def _place_entries(chunks, word_starts):
    """Return where the entries of each chunk begin, and the most entries of all chunks.

    A code takes its sign from the level state, a bit at least, and taking a symbol never makes
    a state larger. So four words for the first states, of which the level state can spare 16
    bits, and 16 bits for each further word are more than enough. There is no more room than that:
    entries that lie far and equally far apart would compete for the same cache lines.
    """
    places = np.empty(chunks.shape[0], np.int64)
    total = 0
    for c in range(places.size):
        places[c] = total
        total += min(chunks[c, fmt.CHUNK_SIZE], 16 * (word_starts[c + 1] - word_starts[c]))
    return places, total


@dataclass(frozen=True)
class _Tiles:
    """All tiles of one block size, and the sizes of scratch arrays that they need."""

    n: int
    tiles: NDArray[np.int64]
    units: NDArray[np.int64]  # first tile of each unit: tiles that share a chunk; and the number of tiles
    most: int  # values of a tile
    blocks: int  # of a tile
    chunks: int


@dataclass(frozen=True)
class _Work:
    """The work of coding one geometry: its tiles, and how many threads they are worth."""

    tiles: tuple[_Tiles, ...]
    words: int  # upper limit of the words of all chunks
    encoders: int
    decoders: int


@lru_cache(maxsize=1024)  # a large model has hundreds of parts
def _work(geometry: fmt.Geometry) -> _Work:
    tiles = geometry.tiles
    sizes, sides, logs = tiles[:, fmt.TILE_SIZE], tiles[:, fmt.TILE_SIDE], tiles[:, fmt.TILE_CHUNK_LOG2]
    # About how many nanoseconds a value takes, and a bit; chunks have about as many bits each.
    value = np.where(sides == 1, 0.1, np.where(sides == 8, 0.3, 1.0))
    bits = CHUNKING.bits / (1 << logs)
    weights = sizes * (value + 2 * bits)
    # Tiles that share a chunk stay together: each goes where the first of them does.
    unit = np.cumsum(tiles[:, fmt.TILE_OFFSET] == 0) - 1
    heaviest_first = np.argsort(-np.bincount(unit, weights)[unit], kind="stable")
    by_size = []
    for n in np.unique(sides).tolist():
        own = heaviest_first[sides[heaviest_first] == n]
        begins = np.flatnonzero(tiles[own, fmt.TILE_OFFSET] == 0)
        by_size.append(
            _Tiles(
                n=n,
                tiles=tiles[own],
                units=np.append(begins, own.size),
                most=int(sizes[own].max()),
                blocks=int(tiles[own, fmt.TILE_BLOCKS].max()),
                chunks=int((-(-sizes[own] >> logs[own])).sum()),
            )
        )
    return _Work(
        tiles=tuple(by_size),
        words=PAIR_WORDS * int(sizes.sum()) + (fmt.STATE_WORDS + PAIR_WORDS) * geometry.chunks,
        encoders=1 + int(weights.sum() / _WORTH_A_THREAD),
        decoders=1 + int((sizes * (value * (sides > 1) + 1.5 * bits)).sum() / _WORTH_A_THREAD),
    )


def encode(
    values: Vector,
    headers: NDArray[np.void],
    geometry: fmt.Geometry,
    steps: Steps,
    left_over: Vector | None,
    crew: Crew,
) -> tuple[Payload | None, int]:
    """Return the stream; or None, and a tensor one of whose chunks has more codes than a header can count."""
    work = _work(geometry)
    chunk_headers = np.zeros(geometry.chunks, fmt.CHUNK)
    places = np.zeros(geometry.chunks, np.int64)
    out, written = room("out", work.words, np.uint16), new_turns()
    more, once = [new_turns() for _ in work.tiles[1:]], new_turns()
    own_floats = []

    def encode_some(part: _Tiles, turns: Turns) -> int:
        n, chunks, most = part.n, part.chunks, part.most + fmt.MAX_NONZERO
        lists = (
            room("entries", part.most + (PADDING + 1) * (n * n + 1), np.int64),
            room("counts", n * n + 1, np.int64),
            room("planar", most, np.int64),
        )
        pairs = PAIRS_AT_ONCE + most
        coder = (
            room("pairs", pairs, np.uint64),
            room("chunks", CHUNK_COLUMNS * chunks, np.int64)[: CHUNK_COLUMNS * chunks].reshape(chunks, -1),
            ENCODING,
            room("words", PAIR_WORDS * pairs + SPARE_WORDS * chunks, np.uint16),
            room("histograms", 4 * SYMBOLS, np.int32).reshape(4, SYMBOLS),
            room("costs", TABLES, np.int32),
        )
        too_large: int = _encoder(n)(
            values, part.tiles, part.units, turns, steps, lists, group_room(n), coder, out, written, places,
            chunk_headers, _NOTHING if left_over is None else left_over,
        )  # fmt: skip
        return too_large

    def encode_on_thread(turns: Turns) -> int:
        too_large = max(map(encode_some, work.tiles, [turns, *more]), default=-1)
        if take_turn(once) == 0:  # the first thread without a tile, while others end their last
            own_floats.append(floats.encode(values, headers, geometry, left_over))
        return too_large

    too_large = max(crew.run(work.encoders, encode_on_thread))
    if too_large >= 0:
        return None, too_large
    payload = new_payload(headers, geometry, geometry.words_at + 2 * int(written[0]))
    chunks, words = payload[geometry.chunks_at : geometry.floats_at], payload[geometry.words_at :]
    _gather(chunk_headers, places, out, chunks.view(fmt.CHUNK), words.view("<u2"))
    payload[geometry.floats_at : geometry.words_at].view("<u2")[:] = own_floats[0]
    return payload, -1


def decode_entries(stream: Stream, crew: Crew) -> tuple[NDArray[np.int64], ...]:
    """Decode all chunks: return entries, each chunk's first entry, and each chunk's number of entries.

    The entries lie in this thread's memory, until its next call.
    """
    work, rows = _work(stream.geometry), stream.geometry.chunk_rows
    places, most = _place_entries(rows, stream.word_starts)
    entries = room("entries", most, np.int64)
    counts = np.empty(stream.geometry.chunks, np.int64)

    def decode_some(turns: Turns) -> int:
        bad: int = decoder.decode_chunks(
            rows, turns, stream.words, stream.word_starts, stream.chunks, SLOT, decoder.DECODING,
            room("lanes", 2 * decoder.LANE, np.uint64).reshape(2, decoder.LANE), entries, places, counts,
        )  # fmt: skip
        return bad

    bad = max(crew.run(work.decoders, decode_some))
    if bad >= 0:
        raise StreamError(f"chunk {bad} is damaged", hint=fmt.HINT)
    return entries, places, counts


def decode(stream: Stream, out: Vector, weight: np.float32, crew: Crew) -> None:
    """Add the decoded tiles times `weight` onto `out`; touch it only if all of them are valid."""
    entries, places, counts = decode_entries(stream, crew)
    work = _work(stream.geometry)
    more = [new_turns() for _ in work.tiles[1:]]

    def add_some(part: _Tiles, turns: Turns) -> None:
        n = part.n
        adder(n)(
            out, part.tiles, turns, entries, places, counts,
            clean_room("codes", part.most + PADDING * n * n if n > 1 else 1, np.int16),
            clean_room("rows", part.blocks if n > 1 else 1, np.uint64),
            stream.steps, weight, *inverse_room(n),
        )  # fmt: skip

    def add_on_thread(turns: Turns) -> None:
        for part, turn in zip(work.tiles, [turns, *more], strict=False):
            add_some(part, turn)

    crew.run(work.decoders, add_on_thread)
