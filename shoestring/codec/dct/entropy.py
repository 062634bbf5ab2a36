"""Compiled entropy coder: the codes of one chunk to 16-bit words, and back.

Two range variants of asymmetric numeral systems (rANS, Duda 2013) run side by side
over one sequence of words: one state for gaps, one for levels, so that a processor
works on both at once. A state holds 32 bits and trades 16 at a time; an encoder goes
backwards through the codes, a decoder forwards.
"""

import numpy as np

from shoestring.codec.dct.format import MAX_LEVEL, STATE_WORDS
from shoestring.codec.dct.jit import decode_jit
from shoestring.codec.dct.lanes import leading_zeros
from shoestring.codec.dct.tables import COST, CUM, EXTRA, FREQ, PROBABILITY_BITS, SLOT, START, SYMBOLS, TABLES

LOWEST = 1 << 16  # a state's smallest value, and what both begin and end with

_COST = np.ascontiguousarray(COST.T)  # [SYMBOLS, TABLES]
_RANGE = (FREQ | CUM << 16).astype(np.uint32)  # [TABLES, SYMBOLS]
_EXTRA = EXTRA.astype(np.int64)
# What an encoder needs of a symbol in one word: frequency, first slot, extra bits.
_EXTRA_AT = np.uint64(24)
_INFO = FREQ.astype(np.uint64) | CUM.astype(np.uint64) << np.uint64(PROBABILITY_BITS)
_INFO |= EXTRA.astype(np.uint64) << _EXTRA_AT
_SLOT_MASK = np.uint64((1 << PROBABILITY_BITS) - 1)
_PROBABILITY_BITS = np.uint64(PROBABILITY_BITS)
_LOWEST = np.uint64(LOWEST)
_MASK8, _MASK16 = np.uint64(0xFF), np.uint64(0xFFFF)
_ZERO, _ONE, _FOUR, _SIXTEEN, _TWENTY, _THIRTY_TWO = (np.uint64(k) for k in (0, 1, 4, 16, 20, 32))
_SIXTY_TWO = np.uint64(62)

# A pair of gap and level as an encoder keeps it, in one word: bits 0-15 place the gap and
# bits 16-31 the level, with its sign, within their symbols, which are bits 32-39 and 40-47.
_LEVEL_AT, _GAP_SYMBOL_AT, _LEVEL_SYMBOL_AT = _SIXTEEN, _THIRTY_TWO, np.uint64(40)

# Columns of a chunk that waits to be pushed: its number and tile, its first pair, how many,
# the zeros after them, both tables and where its words end; then what came of it: where they
# begin, and both states.
NUMBER, TILE, FIRST, PAIRS, TAIL, GAP_TABLE, LEVEL_TABLE, END, BEGIN, GAP_STATE, LEVEL_STATE = range(11)
CHUNK_COLUMNS = 11
# A pair takes at most 4 words; a tail and a store beside the words (see `_push`) take 4 more.
PAIR_WORDS, SPARE_WORDS = 4, 4


@decode_jit
def extra_bits_of(value):
    """Return how many bits place a value below 2**18 within its symbol."""
    return _SIXTY_TWO - leading_zeros(np.uint64(value) | np.uint64(2))


@decode_jit
def symbol_of(value):
    """Return the symbol of a value below 2**18."""
    extra = extra_bits_of(value)
    return np.int64(extra + extra + (np.uint64(value) >> extra))


@decode_jit
def cheapest_table(histogram, costs):
    """Return the table that codes these symbols in the fewest bits."""
    for table in range(TABLES):
        costs[table] = 0
    for symbol in range(SYMBOLS):
        count = histogram[symbol]
        if count:
            for table in range(TABLES):
                costs[table] += np.int32(count * _COST[symbol, table])
    best = 0
    for table in range(1, TABLES):
        if costs[table] < costs[best]:
            best = table
    return best


@decode_jit
def _push(state, info, rest, more_bits, words, at):
    """Push the bits that place a value within its symbol, then the symbol."""
    bits = ((info >> _EXTRA_AT) & _MASK8) + more_bits
    # A word is stored whether the state spills or not: that is cheaper than a branch.
    spill = np.uint64(state >> (_THIRTY_TWO - bits) != _ZERO)
    words[at - _ONE] = np.uint16(state)
    at -= spill
    state = ((state >> (spill << _FOUR)) << bits) | rest
    freq = info & _SLOT_MASK
    spill = np.uint64(state >= freq << _TWENTY)
    words[at - _ONE] = np.uint16(state)
    at -= spill
    state >>= spill << _FOUR
    quotient = np.uint64(np.uint32(state) // np.uint32(freq))
    state += quotient * (np.uint64(1 << PROBABILITY_BITS) - freq) + ((info >> _PROBABILITY_BITS) & _SLOT_MASK)
    return state, at


@decode_jit
def pack_pair(gap, level, histograms, turn):
    """Return a gap and a level as one word, and count their symbols.

    `turn` alternates between 0 and 1: equal symbols in a row would wait for one another in
    one histogram.
    """
    magnitude = np.uint64(abs(level) - 1)
    gap_extra, level_extra = extra_bits_of(gap), extra_bits_of(magnitude)
    gap_top, level_top = np.uint64(gap) >> gap_extra, magnitude >> level_extra
    gap_symbol, level_symbol = gap_extra + gap_extra + gap_top, level_extra + level_extra + level_top
    histograms[turn, gap_symbol] += 1
    histograms[turn + 2, level_symbol] += 1
    gap_rest = np.uint64(gap) - (gap_top << gap_extra)
    level_rest = (magnitude - (level_top << level_extra)) << _ONE | np.uint64(level < 0)
    symbols = gap_symbol << _GAP_SYMBOL_AT | level_symbol << _LEVEL_SYMBOL_AT
    return gap_rest | level_rest << _LEVEL_AT | symbols


@decode_jit
def choose_tables(chunk, histograms, costs):
    """Choose the tables of a chunk whose symbols have been counted; clear the histograms."""
    if chunk[TAIL]:
        histograms[0, symbol_of(chunk[TAIL])] += 1
    for symbol in range(SYMBOLS):
        histograms[0, symbol] += histograms[1, symbol]
        histograms[2, symbol] += histograms[3, symbol]
    chunk[GAP_TABLE] = cheapest_table(histograms[0], costs)
    chunk[LEVEL_TABLE] = cheapest_table(histograms[2], costs)
    for part in range(4):
        for symbol in range(SYMBOLS):
            histograms[part, symbol] = 0


@decode_jit
def _push_pair(pair, gap_infos, level_infos, gap_state, level_state, words, at):
    info = level_infos[(pair >> _LEVEL_SYMBOL_AT) & _MASK8]
    level_state, at = _push(level_state, info, (pair >> _LEVEL_AT) & _MASK16, _ONE, words, at)
    info = gap_infos[(pair >> _GAP_SYMBOL_AT) & _MASK8]
    gap_state, at = _push(gap_state, info, pair & _MASK16, _ZERO, words, at)
    return gap_state, level_state, at


@decode_jit
def _begin_chunk(chunk, words):
    """Push what follows the last pair; return both states and where the words begin."""
    at = np.uint64(chunk[END])
    if chunk[TAIL] == 0:
        return _LOWEST, _LOWEST, at
    tail = np.uint64(chunk[TAIL])
    info = _INFO[chunk[GAP_TABLE], symbol_of(tail)]
    rest = tail & ((_ONE << extra_bits_of(tail)) - _ONE)
    gap_state, at = _push(_LOWEST, info, rest, _ZERO, words, at)
    return gap_state, _LOWEST, at


@decode_jit
def _end_chunk(chunk, gap_state, level_state, at):
    chunk[BEGIN], chunk[GAP_STATE], chunk[LEVEL_STATE] = at, gap_state, level_state


@decode_jit
def push_chunks(pairs, chunks, words):
    """Push the pairs of all chunks, each backwards from its END in `words`.

    A push waits for the one before it, so two chunks are pushed at a time.
    """
    a = b = 0
    a_left = b_left = 0
    a_gap = a_level = a_at = b_gap = b_level = b_at = _ZERO
    waiting = 0
    while True:
        if a_left == 0 and waiting < chunks.shape[0]:
            a, waiting = waiting, waiting + 1
            a_left = chunks[a, PAIRS]
            a_gap, a_level, a_at = _begin_chunk(chunks[a], words)
        if b_left == 0 and waiting < chunks.shape[0]:
            b, waiting = waiting, waiting + 1
            b_left = chunks[b, PAIRS]
            b_gap, b_level, b_at = _begin_chunk(chunks[b], words)
        if a_left == 0:  # only one chunk is left: it takes the other's place
            if b_left == 0:
                return
            a, a_left, a_gap, a_level, a_at, b_left = b, b_left, b_gap, b_level, b_at, 0
        a_gaps, a_levels = _INFO[chunks[a, GAP_TABLE]], _INFO[chunks[a, LEVEL_TABLE]]
        a_pairs = pairs[chunks[a, FIRST] : chunks[a, FIRST] + a_left]
        if b_left == 0:
            for i in range(a_left):
                pair = a_pairs[a_left - 1 - i]
                a_gap, a_level, a_at = _push_pair(pair, a_gaps, a_levels, a_gap, a_level, words, a_at)
            a_left = 0
        else:
            b_gaps, b_levels = _INFO[chunks[b, GAP_TABLE]], _INFO[chunks[b, LEVEL_TABLE]]
            b_pairs = pairs[chunks[b, FIRST] : chunks[b, FIRST] + b_left]
            both = min(a_left, b_left)
            for i in range(both):
                a_pair, b_pair = a_pairs[a_left - 1 - i], b_pairs[b_left - 1 - i]
                a_gap, a_level, a_at = _push_pair(a_pair, a_gaps, a_levels, a_gap, a_level, words, a_at)
                b_gap, b_level, b_at = _push_pair(b_pair, b_gaps, b_levels, b_gap, b_level, words, b_at)
            a_left -= both
            b_left -= both
            if b_left == 0:
                _end_chunk(chunks[b], b_gap, b_level, b_at)
        if a_left == 0:
            _end_chunk(chunks[a], a_gap, a_level, a_at)


@decode_jit
def write_chunk(chunk, words, out):
    """Write a pushed chunk to `out`; return (words, header)."""
    for k, state in enumerate((chunk[GAP_STATE], chunk[LEVEL_STATE])):
        out[2 * k] = np.uint16(state & 0xFFFF)
        out[2 * k + 1] = np.uint16(state >> 16)
    count = chunk[END] - chunk[BEGIN]
    out[STATE_WORDS : STATE_WORDS + count] = words[chunk[BEGIN] : chunk[END]]
    count += STATE_WORDS
    return count, np.uint32(count | chunk[GAP_TABLE] << 18 | chunk[LEVEL_TABLE] << 25)


@decode_jit
def decode_chunk(words, header, begin, size, positions, levels):
    """Write positions (from `begin` on) and levels of a chunk's codes; return how many, or -1.

    -1 stands for words that are not a chunk.

    `words` are the chunk's own words alone, so a read past them is a damaged stream.
    """
    if words.size == 0:
        return 0
    if words.size < STATE_WORDS:
        return -1
    gap_table = np.int64(header >> np.uint32(18)) & 127
    level_table = np.int64(header >> np.uint32(25))
    gap_slot, gap_range = SLOT[gap_table], _RANGE[gap_table]
    level_slot, level_range = SLOT[level_table], _RANGE[level_table]
    gap_state = np.uint64(words[0]) | np.uint64(words[1]) << _SIXTEEN
    level_state = np.uint64(words[2]) | np.uint64(words[3]) << _SIXTEEN
    if gap_state < _LOWEST or level_state < _LOWEST:
        return -1
    at = STATE_WORDS
    last = words.size - 1
    position = 0
    count = 0
    while position < size:
        # A read past the end repeats the last word; `at` tells in the end.
        slot = gap_state & _SLOT_MASK
        symbol = gap_slot[slot]
        span = np.uint64(gap_range[symbol])
        gap_state = (span & _MASK16) * (gap_state >> _PROBABILITY_BITS) + slot - (span >> _SIXTEEN)
        if gap_state < _LOWEST:
            gap_state = gap_state << _SIXTEEN | np.uint64(words[min(at, last)])
            at += 1
        gap = np.int64(START[symbol])
        if symbol >= 4:
            bits = np.uint64(_EXTRA[symbol])
            gap += np.int64(gap_state & ((_ONE << bits) - _ONE))
            gap_state >>= bits
            if gap_state < _LOWEST:
                gap_state = gap_state << _SIXTEEN | np.uint64(words[min(at, last)])
                at += 1
        position += gap
        if position >= size:
            break
        slot = level_state & _SLOT_MASK
        symbol = level_slot[slot]
        span = np.uint64(level_range[symbol])
        level_state = (span & _MASK16) * (level_state >> _PROBABILITY_BITS) + slot - (span >> _SIXTEEN)
        if level_state < _LOWEST:
            level_state = level_state << _SIXTEEN | np.uint64(words[min(at, last)])
            at += 1
        bits = np.uint64(_EXTRA[symbol]) + _ONE
        rest = np.int64(level_state & ((_ONE << bits) - _ONE))
        level_state >>= bits
        if level_state < _LOWEST:
            level_state = level_state << _SIXTEEN | np.uint64(words[min(at, last)])
            at += 1
        level = np.int64(START[symbol]) + (rest >> 1) + 1
        if level > MAX_LEVEL:
            return -1
        positions[count] = begin + position
        levels[count] = -level if rest & 1 else level
        count += 1
        position += 1
    if position != size or at != words.size or gap_state != _LOWEST or level_state != _LOWEST:
        return -1
    return count
