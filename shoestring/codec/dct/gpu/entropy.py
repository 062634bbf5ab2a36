"""Triton kernels of the entropy coder: lists of codes to words and back, one chunk a lane.

The states of a chunk can only be walked one code after the other, so `LANES` chunks of
about the same size walk in step, and time goes by in waiting for memory. So whatever does
not depend on a state is loaded a round or more before it is needed, and the tables are
small enough for the nearest cache.
"""

import triton
import triton.language as tl

from shoestring.codec.dct.gpu.launch import kernel
from shoestring.codec.dct.gpu.lists import CHOSEN, COUNT, LENGTH, code_of, place_of, symbol_of

SYMBOLS = tl.constexpr(36)
NO_CODE = tl.constexpr(32768)  # the level that stands for a zero
MAX_NONZERO = tl.constexpr(65533)
MAX_WORDS = tl.constexpr(0x3FFFF)
LOWEST = tl.constexpr(65536)
STATES = tl.constexpr(4)  # words that the two states of a chunk take
SLACK = tl.constexpr(64)  # words that every chunk has room for, beside those for its codes
SLOTS = tl.constexpr(4096)
SECTOR = tl.constexpr(32)  # bytes that a cache fetches at once
TOUCHED = tl.constexpr(1024)  # sectors of lists that a warp fetches before they are needed
WARM_WORDS = tl.constexpr(256)  # of a chunk, that are fetched before they are needed


@triton.jit
def _spill(x, spills, words, at):
    """Move 16 bits of the states that spill to their words, backwards."""
    at -= spills.to(tl.int32)
    word = (x & 0xFFFF).to(tl.uint16).to(tl.int16, bitcast=True)
    tl.store(words + at, word, mask=spills & (at >= STATES))
    return tl.where(spills, x >> 16, x), at


@triton.jit
def _put(x, active, value, span, bits, reciprocal, words, at):
    """Put the bits that place a value in its symbol, then the symbol, into a state."""
    # A shift by 32 is not defined, so in two steps; no bits, no spill.
    x, at = _spill(x, active & (((x >> (31 - bits)) >> 1) != 0), words, at)
    x = tl.where(active, (x << bits) | value, x)
    freq = span & 4095
    x, at = _spill(x, active & (x >= (freq << 20)), words, at)
    # 2**32 / freq rounded down gives the quotient or one less.
    quotient = tl.umulhi(x, reciprocal)
    left = x - quotient * freq
    more = left >= freq
    put = ((quotient + more.to(tl.uint32)) << 12) + tl.where(more, left - freq, left)
    return tl.where(active, put + ((span >> 12) & 4095), x), at


@triton.jit
def _look_up(symbol, table, wanted, span_ptr, reciprocal_ptr):
    """Return the span of a symbol (frequency, first slot, extra bits) and 2**32 over its frequency."""
    at = table * SYMBOLS + symbol
    span = tl.load(span_ptr + at, mask=wanted, other=1).to(tl.uint32, bitcast=True)
    return span, tl.load(reciprocal_ptr + at, mask=wanted, other=0).to(tl.uint32, bitcast=True)


@triton.jit
def _prepare(item, earlier, i, gap_table, level_table, span_ptr, reciprocal_ptr):
    """Return what putting item `i` of a list takes: gap and level, and what the tables say of them."""
    wanted = i >= 0
    gap = tl.where(wanted, place_of(item) - tl.where(i > 0, place_of(earlier), -1) - 1, 0)
    code = code_of(item)
    above = tl.where(wanted, tl.abs(code) - 1, 0)
    gap_span, gap_reciprocal = _look_up(symbol_of(gap), gap_table, wanted, span_ptr, reciprocal_ptr)
    level_span, level_reciprocal = _look_up(symbol_of(above), level_table, wanted, span_ptr, reciprocal_ptr)
    signed = ((above << 1) | (code < 0).to(tl.int32)).to(tl.uint32)
    return gap.to(tl.uint32), gap_span, gap_reciprocal, signed, level_span, level_reciprocal


@triton.jit
def _low_bits(value, bits):
    return value & ((tl.full(bits.shape, 1, tl.uint32) << bits) - 1)


@kernel
def encode_kernel(
    items_ptr, order_ptr, start_ptr, size_ptr, notes_ptr, span_ptr, reciprocal_ptr, words_ptr, chunks,
    ROOM: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Code `LANES` chunks, each backwards from the end of its own room for words; states come first.

    Note how many words each takes: -1 where it did not have room, more than `MAX_WORDS` where the chunk
    has more codes than it may.
    """
    slot = tl.program_id(0) * LANES + tl.arange(0, LANES)
    live = slot < chunks
    chunk = tl.load(order_ptr + slot, mask=live, other=0)
    count = tl.load(notes_ptr + COUNT * chunks + chunk, mask=live, other=0)
    start = tl.load(start_ptr + chunk)
    size = tl.load(size_ptr + chunk)
    gap_table = tl.load(notes_ptr + CHOSEN * chunks + 2 * chunk)
    level_table = tl.load(notes_ptr + CHOSEN * chunks + 2 * chunk + 1)
    items = items_ptr + start
    words = words_ptr + start * ROOM + chunk * SLACK
    room = size * ROOM + SLACK
    # Touch the lists, so that hardly a round waits for what none has asked for before.
    k = tl.arange(0, TOUCHED // LANES)[None, :] * (SECTOR // 4)
    touched = tl.load(items[:, None] + k, mask=k < count[:, None], other=0) & 1
    never = (tl.sum(tl.sum(touched, 1), 0) < 0).to(tl.int32)  # but what is not used is not loaded
    at = room - never
    gap_state = tl.full([LANES], LOWEST, tl.uint32)
    level_state = tl.full([LANES], LOWEST, tl.uint32)

    i = count - 1
    item = tl.load(items + i, mask=i >= 0, other=0)
    earlier = tl.load(items + i - 1, mask=i >= 1, other=0)
    before = tl.load(items + i - 2, mask=i >= 2, other=0)
    tail = tl.where(count > 0, size - 1 - place_of(item), 0)
    span, reciprocal = _look_up(symbol_of(tail), gap_table, tail > 0, span_ptr, reciprocal_ptr)
    bits = span >> 24
    gap_state, at = _put(
        gap_state, tail > 0, _low_bits(tail.to(tl.uint32), bits), span, bits, reciprocal, words, at
    )
    gap, gap_span, gap_reciprocal, level, level_span, level_reciprocal = _prepare(
        item, earlier, i, gap_table, level_table, span_ptr, reciprocal_ptr
    )
    for _ in range(tl.max(count, 0)):
        active = i >= 0
        i -= 1
        # What the next rounds need is on its way while this one is worked on.
        next_gap, next_gap_span, next_gap_reciprocal, next_level, next_level_span, next_level_reciprocal = (
            _prepare(earlier, before, i, gap_table, level_table, span_ptr, reciprocal_ptr)
        )
        earlier = before
        before = tl.load(items + i - 2, mask=i >= 2, other=0)
        bits = (level_span >> 24) + 1
        level_state, at = _put(
            level_state, active, _low_bits(level, bits), level_span, bits, level_reciprocal, words, at
        )
        bits = gap_span >> 24
        gap_state, at = _put(
            gap_state, active, _low_bits(gap, bits), gap_span, bits, gap_reciprocal, words, at
        )
        gap, gap_span, gap_reciprocal = next_gap, next_gap_span, next_gap_reciprocal
        level, level_span, level_reciprocal = next_level, next_level_span, next_level_reciprocal

    coded = count > 0
    fits = at >= STATES
    for half in tl.static_range(2):
        gap_word = ((gap_state >> (16 * half)) & 0xFFFF).to(tl.uint16).to(tl.int16, bitcast=True)
        level_word = ((level_state >> (16 * half)) & 0xFFFF).to(tl.uint16).to(tl.int16, bitcast=True)
        tl.store(words + at - 4 + half, gap_word, mask=coded & fits)
        tl.store(words + at - 2 + half, level_word, mask=coded & fits)
    length = tl.where(coded, room - at + STATES, 0)
    length = tl.where(count > MAX_NONZERO, MAX_WORDS + 1, tl.where(fits, length, -1))
    tl.store(notes_ptr + LENGTH * chunks + chunk, length, mask=live)


@kernel
def place_kernel(notes_ptr, end_ptr, summary_ptr, chunks, BLOCK: tl.constexpr):
    """Say where the words of each chunk end in the stream: one program for all.

    `summary` receives how many words there are, those of the longest chunk, and whether one had no room.
    """
    end = tl.zeros([], tl.int64)
    longest = tl.zeros([BLOCK], tl.int32)
    shortest = tl.zeros([BLOCK], tl.int32)
    for first in range(0, chunks, BLOCK):
        chunk = first + tl.arange(0, BLOCK)
        live = chunk < chunks
        noted = tl.load(notes_ptr + LENGTH * chunks + chunk, mask=live, other=0)
        longest = tl.maximum(longest, noted)
        shortest = tl.minimum(shortest, noted)
        length = tl.minimum(tl.maximum(noted, 0), MAX_WORDS)
        tl.store(end_ptr + chunk, end + tl.cumsum(length, 0), mask=live)
        end += tl.sum(length, 0)
    tl.store(summary_ptr, end)
    tl.store(summary_ptr + 1, tl.max(longest, 0).to(tl.int64))
    tl.store(summary_ptr + 2, (tl.min(shortest, 0) < 0).to(tl.int64))


@kernel
def pack_kernel(
    words_ptr, start_ptr, size_ptr, notes_ptr, end_ptr, headers_ptr, out_ptr, chunks,
    ROOM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write one chunk's header and words to their places in the stream, if they are what it may have."""
    chunk = tl.program_id(0)
    length = tl.load(notes_ptr + LENGTH * chunks + chunk)
    if (length > 0) & (length <= MAX_WORDS):
        chosen = notes_ptr + CHOSEN * chunks + 2 * chunk
        tl.store(headers_ptr + chunk, length | (tl.load(chosen) << 18) | (tl.load(chosen + 1) << 25))
        room = tl.load(size_ptr + chunk) * ROOM + SLACK
        words = words_ptr + tl.load(start_ptr + chunk) * ROOM + chunk * SLACK + room - length
        out = out_ptr + tl.load(end_ptr + chunk) - length
        for first in range(0, length, BLOCK):
            i = first + tl.arange(0, BLOCK)
            tl.store(out + i, tl.load(words + i, mask=i < length), mask=i < length)
    else:
        tl.store(headers_ptr + chunk, 0)


@triton.jit
def _refill(x, active, buffer, have):
    """Give 16 bits to the states that are short."""
    short = active & (x < LOWEST)
    x = tl.where(short, (x << 16) | (buffer.to(tl.uint32) & 0xFFFF), x)
    return x, tl.where(short, buffer >> 16, buffer), have - short.to(tl.int32)


@triton.jit
def _pop(x, active, span, bits, buffer, have):
    """Take a symbol whose span is known, and the bits that follow it."""
    popped = (span & 4095) * (x >> 12) + (x & 4095) - ((span >> 12) & 4095)
    x, buffer, have = _refill(tl.where(active, popped, x), active, buffer, have)
    value = _low_bits(x, bits)
    x, buffer, have = _refill(tl.where(active, x >> bits, x), active, buffer, have)
    return x, value.to(tl.int32), buffer, have


@triton.jit
def _top_up(buffer, have, ahead, pairs, read, last):
    """See that two words are at hand: as many as a symbol and its bits can take."""
    low = have < 2
    buffer = tl.where(low, buffer | (ahead.to(tl.uint64) << (16 * have).to(tl.uint64)), buffer)
    # Lanes that have enough keep what they loaded before, so none waits for what it does not need.
    ahead = _pair(pairs, read, last, low, ahead.to(tl.int32, bitcast=True))
    return buffer, have + 2 * low.to(tl.int32), ahead, read + low.to(tl.int32)


@triton.jit
def _pair(pairs, read, last, wanted, other):
    """Load two words; past the end of a chunk, whatever lies there."""
    return tl.load(pairs + tl.minimum(read, last), mask=wanted, other=other).to(tl.uint32, bitcast=True)


@triton.jit
def _start_of(symbol, bits):
    return tl.where(symbol < 4, symbol, (2 + (symbol & 1)) << bits.to(tl.int32))


@kernel
def decode_kernel(
    pairs_ptr, headers_ptr, word_ptr, order_ptr, start_ptr, size_ptr, slot_ptr, span_ptr, codes_ptr,
    damage_ptr, chunks, LANES: tl.constexpr,
):  # fmt: skip
    """Decode `LANES` chunks into a cleared buffer of codes; count the damaged ones.

    `pairs` is the whole stream as pairs of 16-bit words; `word` is which of them each chunk begins with.
    """
    slot = tl.program_id(0) * LANES + tl.arange(0, LANES)
    live = slot < chunks
    chunk = tl.load(order_ptr + slot, mask=live, other=0)
    header = tl.load(headers_ptr + chunk, mask=live, other=0).to(tl.uint32, bitcast=True)
    length = (header & MAX_WORDS).to(tl.int32)
    gap_table = ((header >> 18) & 127).to(tl.int32)
    level_table = (header >> 25).to(tl.int32)
    word = tl.load(word_ptr + chunk, mask=live, other=0)
    codes = codes_ptr + tl.load(start_ptr + chunk, mask=live, other=0)
    size = tl.load(size_ptr + chunk, mask=live, other=0)
    gap_slots = slot_ptr + gap_table * SLOTS
    level_slots = slot_ptr + level_table * SLOTS
    damaged = live & (length > 0) & (length < STATES)
    active = live & (length >= STATES)
    pairs = pairs_ptr + word // 2
    odd = (word % 2).to(tl.int32)
    last = (length + odd) // 2
    # Touch both tables and the words, so that hardly a round waits for what none has asked for before.
    k = tl.arange(0, SLOTS // SECTOR) * SECTOR
    warm = tl.sum(tl.load(gap_slots[:, None] + k[None, :]).to(tl.int32), 1)
    warm += tl.sum(tl.load(level_slots[:, None] + k[None, :]).to(tl.int32), 1)
    k = tl.arange(0, WARM_WORDS * 2 // SECTOR)[None, :] * (SECTOR // 4)
    warm += tl.sum(tl.load(pairs[:, None] + k, mask=k <= last[:, None], other=0) & 1, 1)
    zero = tl.zeros([LANES], tl.int32)
    a = _pair(pairs, zero, last, active, zero)
    b = _pair(pairs, zero + 1, last, active, zero)
    c = _pair(pairs, zero + 2, last, active, zero)
    ahead = _pair(pairs, zero + 3, last, active, zero)
    gap_state = tl.where(odd == 1, (a >> 16) | (b << 16), a)
    level_state = tl.where(odd == 1, (b >> 16) | (c << 16), b)
    buffer = tl.where(odd == 1, c >> 16, c).to(tl.uint64)
    read = zero + 4
    buffer, have, ahead, read = _top_up(buffer, 2 - odd, ahead, pairs, read, last)

    damaged |= active & ((gap_state < LOWEST) | (level_state < LOWEST) | (warm < 0))
    checked = active & ~damaged
    active = checked
    position = zero
    gap_symbol = tl.load(gap_slots + (gap_state & 4095).to(tl.int32)).to(tl.int32)
    level_symbol = tl.load(level_slots + (level_state & 4095).to(tl.int32)).to(tl.int32)
    while tl.max(active.to(tl.int32), 0) > 0:
        gap_span = tl.load(span_ptr + gap_table * SYMBOLS + gap_symbol).to(tl.uint32, bitcast=True)
        level_span = tl.load(span_ptr + level_table * SYMBOLS + level_symbol).to(tl.uint32, bitcast=True)
        bits = gap_span >> 24
        start = _start_of(gap_symbol, bits)
        gap_state, rest, buffer, have = _pop(gap_state, active, gap_span, bits, buffer, have)
        gap_symbol = tl.load(gap_slots + (gap_state & 4095).to(tl.int32)).to(tl.int32)
        buffer, have, ahead, read = _top_up(buffer, have, ahead, pairs, read, last)
        position += tl.where(active, start + rest, 0)
        active = active & (position < size)

        bits = level_span >> 24
        start = _start_of(level_symbol, bits)
        level_state, rest, buffer, have = _pop(level_state, active, level_span, bits + 1, buffer, have)
        level_symbol = tl.load(level_slots + (level_state & 4095).to(tl.int32)).to(tl.int32)
        buffer, have, ahead, read = _top_up(buffer, have, ahead, pairs, read, last)
        level = start + (rest >> 1) + 1
        damaged |= active & (level > NO_CODE)
        active = active & ~damaged
        level = tl.where((rest & 1) != 0, -level, level)
        tl.store(codes + position, level.to(tl.int16), mask=active & (tl.abs(level) < NO_CODE))
        position += active.to(tl.int32)
        active = active & (position < size)
    spent = 2 * (read - 1) - odd - have  # the last pair read is still ahead
    whole = (position == size) & (spent == length) & (gap_state == LOWEST) & (level_state == LOWEST)
    damaged |= checked & ~whole
    tl.atomic_add(damage_ptr, tl.sum(damaged.to(tl.int32), 0))
