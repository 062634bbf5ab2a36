"""Compiled entropy coder: the codes of one chunk to 16-bit words, and back.

Two range variants of asymmetric numeral systems (rANS, Duda 2013) run side by side
over one sequence of words: one state for gaps, one for levels, so that a processor
works on both at once. A state holds 32 bits and trades 16 at a time; an encoder goes
backwards through the codes, a decoder forwards.
"""

import numpy as np

from shoestring.codec.dct.format import MAX_LEVEL, STATE_WORDS
from shoestring.codec.dct.jit import decode_jit
from shoestring.codec.dct.tables import COST, CUM, EXTRA, FREQ, PROBABILITY_BITS, SLOT, START, SYMBOLS, TABLES

LOWEST = 1 << 16  # a state's smallest value, and what both begin and end with

_COST = np.ascontiguousarray(COST.T)  # [SYMBOLS, TABLES]
_RANGE = (FREQ | CUM << 16).astype(np.uint32)  # [TABLES, SYMBOLS]
_EXTRA = EXTRA.astype(np.int64)
# What an encoder needs of a symbol in one word: frequency, first slot, extra bits, first value.
_EXTRA_AT, _START_AT = np.uint64(24), np.uint64(32)
_INFO = FREQ.astype(np.uint64) | CUM.astype(np.uint64) << np.uint64(PROBABILITY_BITS)
_INFO |= EXTRA.astype(np.uint64) << _EXTRA_AT | START.astype(np.uint64) << _START_AT
_SLOT_MASK = np.uint64((1 << PROBABILITY_BITS) - 1)
_PROBABILITY_BITS = np.uint64(PROBABILITY_BITS)
_LOWEST = np.uint64(LOWEST)
_MASK16 = np.uint64(0xFFFF)
_SIXTEEN = np.uint64(16)
_ZERO, _ONE, _FOUR, _TWENTY, _THIRTY_TWO = (np.uint64(k) for k in (0, 1, 4, 20, 32))
_MASK8 = np.uint64(0xFF)


_SMALL = 256
_SYMBOL_OF = (np.searchsorted(START, np.arange(_SMALL), side="right") - 1).astype(np.uint8)


@decode_jit
def symbol_of(value):
    """Return the symbol of a value below 2**18; octaves are alike, so a small table serves all."""
    if value < _SMALL:
        return np.int64(_SYMBOL_OF[value])
    if value < _SMALL << 7:
        return np.int64(_SYMBOL_OF[value >> 7]) + 14
    return np.int64(_SYMBOL_OF[value >> 11]) + 22


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
def encode_chunk(gaps, levels, count, tail, scratch, backwards, out):
    """Code `count` gaps and levels, and `tail` zeros after them; return (words, header).

    `backwards` is room for the words before they are turned around.
    """
    if count == 0:
        return 0, np.uint32(0)
    symbols, histograms, costs = scratch
    gap_symbols, level_symbols = symbols[0], symbols[1]
    for symbol in range(SYMBOLS):
        for part in range(4):
            histograms[part, symbol] = 0
    for i in range(count):
        gap_symbol = symbol_of(gaps[i])
        level_symbol = symbol_of(abs(np.int32(levels[i])) - 1)
        gap_symbols[i] = gap_symbol
        level_symbols[i] = level_symbol
        # Two histograms each: equal symbols in a row would wait for one another.
        histograms[i & 1, gap_symbol] += 1
        histograms[2 + (i & 1), level_symbol] += 1
    if tail:
        histograms[0, symbol_of(tail)] += 1
    for symbol in range(SYMBOLS):
        histograms[0, symbol] += histograms[1, symbol]
        histograms[2, symbol] += histograms[3, symbol]
    gap_table = cheapest_table(histograms[0], costs)
    level_table = cheapest_table(histograms[2], costs)
    gap_infos, level_infos = _INFO[gap_table], _INFO[level_table]

    at = np.uint64(backwards.size)
    gap_state = level_state = _LOWEST
    if tail:
        info = gap_infos[symbol_of(tail)]
        gap_state, at = _push(gap_state, info, np.uint64(tail) - (info >> _START_AT), _ZERO, backwards, at)
    i = np.uint64(count)
    while i != _ZERO:
        i -= _ONE
        level = np.int64(levels[i])
        info = level_infos[np.uint64(level_symbols[i])]
        rest = ((np.uint64(abs(level)) - _ONE - (info >> _START_AT)) << _ONE) | np.uint64(level < 0)
        level_state, at = _push(level_state, info, rest, _ONE, backwards, at)
        info = gap_infos[np.uint64(gap_symbols[i])]
        gap_state, at = _push(gap_state, info, np.uint64(gaps[i]) - (info >> _START_AT), _ZERO, backwards, at)

    out[0] = np.uint16(gap_state & _MASK16)
    out[1] = np.uint16(gap_state >> _SIXTEEN)
    out[2] = np.uint16(level_state & _MASK16)
    out[3] = np.uint16(level_state >> _SIXTEEN)
    words = backwards.size - np.int64(at)
    out[STATE_WORDS : STATE_WORDS + words] = backwards[np.int64(at) :]
    words += STATE_WORDS
    return words, np.uint32(words | gap_table << 18 | level_table << 25)


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
