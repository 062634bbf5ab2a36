"""Compiled entropy decoder: the words of chunks to lists of codes. `encoder.py` is the inverse."""

import numpy as np
from numpy.typing import NDArray

from shoestring.codec.dct.cpu.encoder import LOWEST
from shoestring.codec.dct.format import CHUNK_BEGIN, CHUNK_SIZE, NO_CODE, STATE_WORDS
from shoestring.codec.dct.tables import CUM, EXTRA, FREQ, PROBABILITY_BITS, START, SYMBOLS, TABLES
from shoestring.compiled.jit import decode_jit
from shoestring.compiled.turns import take_turn

# Columns of a symbol in `DECODING`, [gap or level, TABLES, SYMBOLS * columns]. The start of a level
# is doubled, because its lowest bit is the sign.
_FREQ, _CUM, _BITS, _START, _COLUMNS = range(5)


def _decoding() -> NDArray[np.uint64]:
    infos = np.zeros((2, TABLES, SYMBOLS, _COLUMNS), np.uint64)
    infos[:, :, :, _FREQ], infos[:, :, :, _CUM] = FREQ, CUM
    for kind in range(2):
        infos[kind, :, :, _BITS] = EXTRA + kind
        infos[kind, :, :, _START] = START << kind
    return infos.reshape(2, TABLES, SYMBOLS * _COLUMNS)


DECODING = _decoding()

# Columns of a lane, which decodes a chunk: its row, its tables, its states, its next word and
# the first that is not its own, its next position, how many codes it has found, whether one of
# them cannot be, and whether the lane has a chunk at all.
_CHUNK, _GAPS, _LEVELS, _GAP, _LEVEL, _AT, _STOP, _POSITION, _COUNT, _BAD, _BUSY, LANE = range(12)

_LOWEST = np.uint64(LOWEST)
_SLOT_MASK = np.uint64((1 << PROBABILITY_BITS) - 1)
_PROBABILITY_BITS = np.uint64(PROBABILITY_BITS)
_ONE, _SIXTEEN = np.uint64(1), np.uint64(16)
_NO_CODE, _TOO_LARGE = np.uint64(NO_CODE - 1 << 1), np.uint64(NO_CODE << 1)
_CODE_WORDS = np.uint64(4)  # no code takes more
_FAR = np.uint64(0xFFFFFFFFFFFFFFFF)


@decode_jit
def _refill(state, words, at, last):
    """Add a word to a low state. Past `last` that word is read again, and `at` shows the damage."""
    low = state < _LOWEST
    filled = state << _SIXTEEN | np.uint64(words[min(at, last)])
    return filled if low else state, at + np.uint64(low)


@decode_jit
def _take(state, slots, infos, words, at, last):
    """Take a symbol and its bits from a state; return their number, the state and the next word."""
    slot = state & _SLOT_MASK
    symbol = np.uint64(slots[slot]) * np.uint64(_COLUMNS)
    state = infos[symbol + np.uint64(_FREQ)] * (state >> _PROBABILITY_BITS) + slot
    state, at = _refill(state - infos[symbol + np.uint64(_CUM)], words, at, last)
    bits = infos[symbol + np.uint64(_BITS)]
    number = infos[symbol + np.uint64(_START)] + (state & ((_ONE << bits) - _ONE))
    state, at = _refill(state >> bits, words, at, last)
    return number, state, at


@decode_jit
def _open(lane, chunk, words, word_starts, headers):
    """Begin a chunk that has words; return whether its first words are valid."""
    at, stop = word_starts[chunk], word_starts[chunk + 1]
    if stop - at < STATE_WORDS:
        return False
    header = np.uint64(headers[chunk])
    lane[_CHUNK], lane[_GAPS], lane[_LEVELS] = (
        chunk,
        header >> np.uint64(18) & np.uint64(127),
        header >> np.uint64(25),
    )
    lane[_GAP] = np.uint64(words[at]) | np.uint64(words[at + 1]) << _SIXTEEN
    lane[_LEVEL] = np.uint64(words[at + 2]) | np.uint64(words[at + 3]) << _SIXTEEN
    lane[_AT], lane[_STOP], lane[_POSITION], lane[_COUNT] = at + STATE_WORDS, stop, 0, 0
    lane[_BAD], lane[_BUSY] = 0, 1
    return lane[_GAP] >= _LOWEST and lane[_LEVEL] >= _LOWEST


@decode_jit
def _close(lane, chunk, out, words, slots, infos, entries):
    """Decode the last codes of a chunk; return its number of codes, or -1 if it is damaged."""
    gap_slots, gap_infos = slots[lane[_GAPS]], infos[0, lane[_GAPS]]
    level_slots, level_infos = slots[lane[_LEVELS]], infos[1, lane[_LEVELS]]
    gap_state, level_state, at, last = lane[_GAP], lane[_LEVEL], lane[_AT], lane[_STOP] - _ONE
    position, count, size = lane[_POSITION], lane[_COUNT], np.uint64(chunk[CHUNK_SIZE])
    begin, out = np.uint64(chunk[CHUNK_BEGIN]), np.uint64(out)
    lane[_BUSY] = 0
    if lane[_BAD]:
        return -1
    while position < size:
        gap, gap_state, at = _take(gap_state, gap_slots, gap_infos, words, at, last)
        position += gap
        if position >= size:
            break
        level, level_state, at = _take(level_state, level_slots, level_infos, words, at, last)
        if level >= _TOO_LARGE or at > lane[_STOP]:
            return -1
        if level < _NO_CODE:
            entries[out + count] = np.int64((begin + position) << _SIXTEEN | level)
            count += _ONE
        position += _ONE
    if position != size or at != lane[_STOP] or gap_state != _LOWEST or level_state != _LOWEST:
        return -1
    return np.int64(count)


@decode_jit
def _decode_two(a, b, chunks, places, words, slots, infos, entries):
    """Decode both lanes until a lane nears its end; return a bit for each lane that does.

    While a lane has words left for any code, none of its reads can leave them.
    """
    a_gap_slots, a_gap_infos = slots[a[_GAPS]], infos[0, a[_GAPS]]
    a_level_slots, a_level_infos = slots[a[_LEVELS]], infos[1, a[_LEVELS]]
    b_gap_slots, b_gap_infos = slots[b[_GAPS]], infos[0, b[_GAPS]]
    b_level_slots, b_level_infos = slots[b[_LEVELS]], infos[1, b[_LEVELS]]
    a_gap_state, a_level_state, a_at, a_safe = a[_GAP], a[_LEVEL], a[_AT], a[_STOP] - _CODE_WORDS
    b_gap_state, b_level_state, b_at, b_safe = b[_GAP], b[_LEVEL], b[_AT], b[_STOP] - _CODE_WORDS
    a_begin, b_begin = np.uint64(chunks[a[_CHUNK], CHUNK_BEGIN]), np.uint64(chunks[b[_CHUNK], CHUNK_BEGIN])
    a_end = a_begin + np.uint64(chunks[a[_CHUNK], CHUNK_SIZE])
    b_end = b_begin + np.uint64(chunks[b[_CHUNK], CHUNK_SIZE])
    a_position, b_position = a_begin + a[_POSITION], b_begin + b[_POSITION]
    a_first, b_first = np.uint64(places[a[_CHUNK]]), np.uint64(places[b[_CHUNK]])
    a_out, b_out = a_first + a[_COUNT], b_first + b[_COUNT]
    a_gap = b_gap = np.uint64(0)
    while a_at <= a_safe and b_at <= b_safe:
        a_gap, a_after, a_next = _take(a_gap_state, a_gap_slots, a_gap_infos, words, a_at, _FAR)
        b_gap, b_after, b_next = _take(b_gap_state, b_gap_slots, b_gap_infos, words, b_at, _FAR)
        if a_position + a_gap >= a_end or b_position + b_gap >= b_end:
            break  # `_close` takes this gap again
        a_level, a_level_state, a_at = _take(a_level_state, a_level_slots, a_level_infos, words, a_next, _FAR)
        b_level, b_level_state, b_at = _take(b_level_state, b_level_slots, b_level_infos, words, b_next, _FAR)
        a_gap_state, b_gap_state = a_after, b_after
        entries[a_out] = np.int64((a_position + a_gap) << _SIXTEEN | a_level)
        entries[b_out] = np.int64((b_position + b_gap) << _SIXTEEN | b_level)
        a_out, b_out = a_out + _ONE, b_out + _ONE
        a_position, b_position = a_position + a_gap + _ONE, b_position + b_gap + _ONE
        if a_level >= _NO_CODE or b_level >= _NO_CODE:
            a_out, b_out = a_out - np.uint64(a_level >= _NO_CODE), b_out - np.uint64(b_level >= _NO_CODE)
            a[_BAD], b[_BAD] = a_level >= _TOO_LARGE, b_level >= _TOO_LARGE
            if a[_BAD] or b[_BAD]:
                break
    a[_GAP], a[_LEVEL], a[_AT], a[_POSITION] = a_gap_state, a_level_state, a_at, a_position - a_begin
    b[_GAP], b[_LEVEL], b[_AT], b[_POSITION] = b_gap_state, b_level_state, b_at, b_position - b_begin
    a[_COUNT], b[_COUNT] = a_out - a_first, b_out - b_first
    a_ends = a[_BAD] or a_at > a_safe or a_position + a_gap >= a_end
    b_ends = b[_BAD] or b_at > b_safe or b_position + b_gap >= b_end
    return np.int64(a_ends) | np.int64(b_ends) << 1


@decode_jit
def decode_chunks(chunks, turns, words, word_starts, headers, slots, infos, lanes, entries, places, counts):
    """Take chunks and decode them into entries; return -1, or the number of a damaged chunk.

    An entry is `position << 16 | (magnitude - 1) << 1 | sign`, as in an encoder (`lists.py`); its
    position counts from the beginning of the chunk's tile, or of the first of them.
    `slots` and `infos` are SLOT and DECODING; `lanes` is memory, [2, LANE]; `places` says where the
    entries of each chunk go, with room for as many as it has codes, or its words bits; `counts`
    receives how many they are.
    """
    for k in range(2):
        lanes[k, _BUSY] = 0
    waiting = take_turn(turns)
    while True:
        for k in range(2):
            while not lanes[k, _BUSY] and waiting < chunks.shape[0]:
                counts[waiting] = 0
                if word_starts[waiting] < word_starts[waiting + 1] and not _open(
                    lanes[k], waiting, words, word_starts, headers
                ):
                    return waiting
                waiting = take_turn(turns)
        ended = 3
        if lanes[0, _BUSY] and lanes[1, _BUSY]:
            ended = _decode_two(lanes[0], lanes[1], chunks, places, words, slots, infos, entries)
        elif not (lanes[0, _BUSY] or lanes[1, _BUSY]):
            return -1
        for k in range(2):
            if ended >> k & 1 and lanes[k, _BUSY]:
                chunk = np.int64(lanes[k, _CHUNK])
                counts[chunk] = _close(lanes[k], chunks[chunk], places[chunk], words, slots, infos, entries)
                if counts[chunk] < 0:
                    return chunk
