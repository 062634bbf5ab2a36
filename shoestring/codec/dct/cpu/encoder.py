"""Compiled entropy coder: the codes of chunks to 16-bit words. `decoder.py` is the inverse.

Two range variants of asymmetric numeral systems (rANS, Duda 2013) run side by side
over one sequence of words: one state for gaps, one for levels, so that a processor
works on both at once. A state holds 32 bits and trades 16 at a time; an encoder goes
backwards through the codes, a decoder forwards. Each step waits for the one before it,
so both take two chunks at a time, and neither branches on what a state needs.
"""

import numpy as np
from numpy.typing import NDArray

from shoestring.codec.dct.cpu.lanes import leading_zeros
from shoestring.codec.dct.format import STATE_WORDS
from shoestring.codec.dct.tables import COST, CUM, EXTRA, FREQ, PROBABILITY_BITS, SYMBOLS, TABLES
from shoestring.compiled.jit import copy, decode_jit

LOWEST = 1 << 16  # a state's smallest value, and what both begin and end with

_COST = np.ascontiguousarray(COST.T)  # [SYMBOLS, TABLES]

# What an encoder needs to put a symbol and its bits, [gap or level, TABLES, SYMBOLS * columns]:
# the first state that spills before the bits, how many these are, the first that spills before
# the symbol, and the rest for the step itself. As whole words, that no instruction takes apart.
# A state below F * 2**20, divided by F < 4096, is `state * ceil(2**44 / F) >> 44`: the product is
# below 2**64, and what rounding up adds to the quotient is below F / 2**24 < 1 / F.
_BITS_LIMIT, _BITS, _LIMIT, _RECIPROCAL, _COMPLEMENT, _CUM, _COLUMNS = 0, 1, 2, 3, 4, 5, 8
_RECIPROCAL_BITS = 44


def _encoding() -> NDArray[np.uint64]:
    infos = np.zeros((2, TABLES, SYMBOLS, _COLUMNS), np.uint64)
    for kind in range(2):
        bits = EXTRA.astype(np.uint64) + np.uint64(kind)  # a level has a sign
        infos[kind, :, :, _BITS_LIMIT] = np.uint64(1 << 32) >> bits
        infos[kind, :, :, _BITS] = bits
    infos[:, :, :, _LIMIT] = FREQ.astype(np.uint64) << np.uint64(32 - PROBABILITY_BITS)
    infos[:, :, :, _RECIPROCAL] = -(-(1 << _RECIPROCAL_BITS) // FREQ.astype(np.int64))
    infos[:, :, :, _COMPLEMENT] = (1 << PROBABILITY_BITS) - FREQ
    infos[:, :, :, _CUM] = CUM
    return infos.reshape(2, TABLES, SYMBOLS * _COLUMNS)


ENCODING = _encoding()

_LOWEST = np.uint64(LOWEST)
_MASK16 = np.uint64(0xFFFF)
_ZERO, _ONE, _SIXTEEN, _THIRTY_TWO, _SIXTY_TWO = (np.uint64(k) for k in (0, 1, 16, 32, 62))

# A pair in the memory of an encoder, four numbers of 16 bits: what places the gap within its symbol,
# where that symbol is in a row of ENCODING, and the same of the level, with its sign.
_GAP_REST, _GAP_SYMBOL, _LEVEL_REST, _LEVEL_SYMBOL, PAIR = range(5)

# Columns of a chunk that waits to be encoded: its number, its first pair, how many, the zeros after
# them, both tables and where its words end; then what came of it: where they begin, and both states.
NUMBER, FIRST, PAIRS, TAIL, GAP_TABLE, LEVEL_TABLE, END, BEGIN, GAP_STATE, LEVEL_STATE = range(10)
CHUNK_COLUMNS = 10
# A pair takes at most 4 words; a tail and a store beside the words (see `_put`) take 4 more.
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
def _put(state, infos, symbol, rest, words, at):
    """Put the bits that place a value within its symbol, then the symbol, into a state."""
    # A word is stored whether the state spills or not: that is cheaper than a branch.
    words[at - _ONE] = np.uint16(state)
    spill = state >= infos[symbol + np.uint64(_BITS_LIMIT)]
    at -= np.uint64(spill)
    state = state >> _SIXTEEN if spill else state
    state = state << infos[symbol + np.uint64(_BITS)] | rest
    words[at - _ONE] = np.uint16(state)
    spill = state >= infos[symbol + np.uint64(_LIMIT)]
    at -= np.uint64(spill)
    state = state >> _SIXTEEN if spill else state
    quotient = state * infos[symbol + np.uint64(_RECIPROCAL)] >> np.uint64(_RECIPROCAL_BITS)
    state += quotient * infos[symbol + np.uint64(_COMPLEMENT)] + infos[symbol + np.uint64(_CUM)]
    return state, at


@decode_jit
def pack_pairs(entries, begin, pairs):
    """Write the codes of a chunk that begins at position `begin` as pairs.

    An entry is `position << 16 | (magnitude - 1) << 1 | sign`. Nothing here waits for what was
    before, so a vector unit does several at once.
    """
    for i in range(entries.size):
        position, level = np.uint64(entries[i] >> 16), np.uint64(entries[i] & 0xFFFF)
        gap = position - (np.uint64(entries[i - 1] >> 16) + _ONE if i else np.uint64(begin))
        gap_extra, level_extra = extra_bits_of(gap), extra_bits_of(level >> _ONE)
        gap_symbol = gap_extra + gap_extra + (gap >> gap_extra)
        level_symbol = level_extra + level_extra + (level >> _ONE >> level_extra)
        gap_rest = gap & ((_ONE << gap_extra) - _ONE)
        level_rest = level & ((_ONE << level_extra << _ONE) - _ONE)
        symbols = (gap_symbol | level_symbol << _THIRTY_TWO) * np.uint64(_COLUMNS)
        pairs[i] = gap_rest | level_rest << _THIRTY_TWO | symbols << _SIXTEEN


@decode_jit
def choose_tables(chunk, pairs, histograms, costs):
    """Choose the tables of a chunk with these pairs, and a tail if it has one."""
    for part in range(4):
        for symbol in range(SYMBOLS):
            histograms[part, symbol] = 0
    for i in range(pairs.size):
        # Two histograms each: equal symbols in a row would wait for one another.
        histograms[i & 1, (pairs[i] >> _SIXTEEN & _MASK16) // np.uint64(_COLUMNS)] += 1
        histograms[2 + (i & 1), (pairs[i] >> np.uint64(48)) // np.uint64(_COLUMNS)] += 1
    if chunk[TAIL]:
        histograms[0, symbol_of(chunk[TAIL])] += 1
    for symbol in range(SYMBOLS):
        histograms[0, symbol] += histograms[1, symbol]
        histograms[2, symbol] += histograms[3, symbol]
    chunk[GAP_TABLE] = cheapest_table(histograms[0], costs)
    chunk[LEVEL_TABLE] = cheapest_table(histograms[2], costs)


@decode_jit
def _put_pair(pairs, at_pair, gap_infos, level_infos, gap_state, level_state, words, at):
    symbol, rest = pairs[at_pair + np.uint64(_LEVEL_SYMBOL)], pairs[at_pair + np.uint64(_LEVEL_REST)]
    level_state, at = _put(level_state, level_infos, np.uint64(symbol), np.uint64(rest), words, at)
    symbol, rest = pairs[at_pair + np.uint64(_GAP_SYMBOL)], pairs[at_pair + np.uint64(_GAP_REST)]
    gap_state, at = _put(gap_state, gap_infos, np.uint64(symbol), np.uint64(rest), words, at)
    return gap_state, level_state, at


@decode_jit
def _begin_chunk(chunk, infos, words):
    """Put what follows the last pair; return its place, both states and where the words begin."""
    next_pair = np.uint64((chunk[FIRST] + chunk[PAIRS]) * PAIR)
    at = np.uint64(chunk[END])
    gap_state = _LOWEST
    if chunk[TAIL]:
        tail = np.uint64(chunk[TAIL])
        symbol, rest = np.uint64(symbol_of(tail) * _COLUMNS), tail & ((_ONE << extra_bits_of(tail)) - _ONE)
        gap_state, at = _put(_LOWEST, infos[0, chunk[GAP_TABLE]], symbol, rest, words, at)
    return next_pair, gap_state, _LOWEST, at


@decode_jit
def _end_chunk(chunk, gap_state, level_state, at):
    chunk[BEGIN], chunk[GAP_STATE], chunk[LEVEL_STATE] = at, gap_state, level_state


@decode_jit
def encode_chunks(pairs, chunks, infos, words):
    """Encode the pairs of all chunks, each backwards from its END in `words`; `infos` is ENCODING.

    Each pair waits for the one before it, so two chunks are encoded at a time.
    """
    a = b = 0
    a_left = b_left = 0
    a_pair = a_gap = a_level = a_at = b_pair = b_gap = b_level = b_at = _ZERO
    size = np.uint64(PAIR)
    waiting = 0
    while True:
        if a_left == 0 and waiting < chunks.shape[0]:
            a, waiting = waiting, waiting + 1
            a_left = chunks[a, PAIRS]
            a_pair, a_gap, a_level, a_at = _begin_chunk(chunks[a], infos, words)
        if b_left == 0 and waiting < chunks.shape[0]:
            b, waiting = waiting, waiting + 1
            b_left = chunks[b, PAIRS]
            b_pair, b_gap, b_level, b_at = _begin_chunk(chunks[b], infos, words)
        if a_left == 0:  # only one chunk is left: it takes the other's place
            if b_left == 0:
                return
            a, a_left, a_pair, a_gap, a_level, a_at = b, b_left, b_pair, b_gap, b_level, b_at
            b_left = 0
        a_gaps, a_levels = infos[0, chunks[a, GAP_TABLE]], infos[1, chunks[a, LEVEL_TABLE]]
        if b_left == 0:
            for _ in range(a_left):
                a_pair -= size
                a_gap, a_level, a_at = _put_pair(pairs, a_pair, a_gaps, a_levels, a_gap, a_level, words, a_at)
            a_left = 0
        else:
            b_gaps, b_levels = infos[0, chunks[b, GAP_TABLE]], infos[1, chunks[b, LEVEL_TABLE]]
            both = min(a_left, b_left)
            for _ in range(both):
                a_pair -= size
                b_pair -= size
                a_gap, a_level, a_at = _put_pair(pairs, a_pair, a_gaps, a_levels, a_gap, a_level, words, a_at)
                b_gap, b_level, b_at = _put_pair(pairs, b_pair, b_gaps, b_levels, b_gap, b_level, words, b_at)
            a_left -= both
            b_left -= both
            if b_left == 0:
                _end_chunk(chunks[b], b_gap, b_level, b_at)
        if a_left == 0:
            _end_chunk(chunks[a], a_gap, a_level, a_at)


@decode_jit
def write_chunk(chunk, words, out):
    """Write an encoded chunk to `out`; return its header."""
    for k, state in enumerate((chunk[GAP_STATE], chunk[LEVEL_STATE])):
        out[2 * k] = np.uint16(state & 0xFFFF)
        out[2 * k + 1] = np.uint16(state >> 16)
    count = chunk[END] - chunk[BEGIN]
    copy(words, chunk[BEGIN], out, STATE_WORDS, count)
    count += STATE_WORDS
    return np.uint32(count | chunk[GAP_TABLE] << 18 | chunk[LEVEL_TABLE] << 25)
