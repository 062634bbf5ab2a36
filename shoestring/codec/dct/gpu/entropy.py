"""Triton kernels of the entropy coder: codes to words and back, one chunk a lane.

What can be done for all codes at once is: counting and listing them, choosing tables.
The states of a chunk can only be walked one code after the other, so `LANES` chunks of
about the same size walk in step, and the codes they need next lie side by side.
"""

import triton
import triton.language as tl

from shoestring.codec.dct.gpu.transform import to_codes

MAX_LEVEL = tl.constexpr(32767)
ROUNDING = tl.constexpr(11 / 32)
SYMBOLS = tl.constexpr(36)
BINS = tl.constexpr(64)  # symbols, padded
TABLES = tl.constexpr(128)
LOWEST = tl.constexpr(65536)


@triton.jit
def symbol_of(value):
    """Itself below 2, two an octave above: exponent and top bit of the value as a float."""
    return tl.where(value < 2, value, (value.to(tl.float32).to(tl.int32, bitcast=True) >> 22) - 254)


@triton.jit
def _extra_bits(symbol):
    return tl.maximum((symbol >> 1) - 1, 0)


@triton.jit
def _first_value(symbol):
    return tl.where(symbol < 4, symbol, (2 + (symbol & 1)) << _extra_bits(symbol))


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _cheapest(histogram, cost_ptr):
    """Return (table, its cost in 1/256 bit) for a histogram of symbols [BINS]."""
    s = tl.arange(0, BINS)
    t = tl.arange(0, TABLES)
    costs = tl.sum(
        tl.load(cost_ptr + t[:, None] * BINS + s[None, :]).to(tl.int32) * histogram[None, :], axis=1
    )
    return tl.argmin(costs, 0), tl.min(costs, 0)


@triton.jit
def _count_symbols(symbol, counted):
    return tl.histogram(tl.where(counted, symbol, BINS - 1), BINS)


@triton.jit
def cost_kernel(
    c_ptr, start_ptr, size_ptr, tensor_ptr, rms_ptr, relative_ptr, cost_ptr, result_ptr, BLOCK: tl.constexpr
):
    """Say how many bits a sample's coefficients would take at a step over rms, and the error in steps."""
    sample = tl.program_id(0)
    item = sample * tl.num_programs(1) + tl.program_id(1)
    start = tl.load(start_ptr + sample)
    size = tl.load(size_ptr + sample)
    step = tl.load(relative_ptr + tl.program_id(1)) * tl.load(rms_ptr + tl.load(tensor_ptr + sample))
    step = tl.maximum(step, 1e-30)
    inverse_step = 1.0 / step
    threshold = (1.0 - ROUNDING) * step
    gap_histogram = tl.zeros([BINS], tl.int32)
    level_histogram = tl.zeros([BINS], tl.int32)
    error = tl.zeros([BLOCK], tl.float32)
    bits = tl.zeros([BLOCK], tl.int32)
    last = -1
    for first in range(0, size, BLOCK):
        k = first + tl.arange(0, BLOCK)
        c = tl.load(c_ptr + start + k, mask=k < size, other=0.0)
        before = tl.load(c_ptr + start + k - 1, mask=(k < size) & (k > 0), other=0.0)
        q = tl.abs(to_codes(c, threshold, inverse_step))
        exact = tl.abs(c) * inverse_step - q.to(tl.float32)
        error += exact * exact
        coded = q > 0
        marked = tl.where(tl.abs(before) >= threshold, k - 1, -1)
        gap_symbol = symbol_of(k - tl.maximum(tl.associative_scan(marked, 0, _larger), last) - 1)
        level_symbol = symbol_of(tl.maximum(q, 1) - 1)
        gap_histogram += _count_symbols(gap_symbol, coded)
        level_histogram += _count_symbols(level_symbol, coded)
        bits += tl.where(coded, _extra_bits(gap_symbol) + _extra_bits(level_symbol) + 1, 0)
        last = tl.maximum(last, tl.max(tl.where(coded, k, -1), 0))
    bins = tl.arange(0, BINS)
    _, gap_cost = _cheapest(tl.where(bins < SYMBOLS, gap_histogram, 0), cost_ptr)
    _, level_cost = _cheapest(tl.where(bins < SYMBOLS, level_histogram, 0), cost_ptr)
    items = tl.num_programs(0) * tl.num_programs(1)
    tl.store(result_ptr + item, tl.sum(bits, 0) + (gap_cost + level_cost).to(tl.float32) / 256)
    tl.store(result_ptr + items + item, tl.sum(error, 0))


@triton.jit
def count_kernel(codes_ptr, start_ptr, size_ptr, count_ptr, BLOCK: tl.constexpr):
    """Count the codes of one piece of a chunk."""
    pid = tl.program_id(0)
    k = tl.arange(0, BLOCK)
    q = tl.load(codes_ptr + tl.load(start_ptr + pid) + k, mask=k < tl.load(size_ptr + pid), other=0)
    tl.store(count_ptr + pid, tl.sum((q != 0).to(tl.int32), 0))


@triton.jit
def list_kernel(
    codes_ptr,
    start_ptr,
    size_ptr,
    offset_ptr,
    count_ptr,
    end_ptr,
    positions_ptr,
    levels_ptr,
    BLOCK: tl.constexpr,
):
    """List the places in their chunk and the levels of one piece's codes."""
    pid = tl.program_id(0)
    count = tl.load(count_ptr + pid)
    if count > 0:
        k = tl.arange(0, BLOCK)
        q = tl.load(codes_ptr + tl.load(start_ptr + pid) + k, mask=k < tl.load(size_ptr + pid), other=0)
        coded = q != 0
        at = tl.load(end_ptr + pid) - count + tl.cumsum(coded.to(tl.int32), 0) - 1
        tl.store(positions_ptr + at, tl.load(offset_ptr + pid) + k, mask=coded)
        tl.store(levels_ptr + at, q, mask=coded)


@triton.jit
def _listed(positions_ptr, levels_ptr, k, inside):
    """Return position, gap and level of the codes `k` of a chunk's list."""
    position = tl.load(positions_ptr + k, mask=inside, other=0)
    before = tl.load(positions_ptr + k - 1, mask=inside & (k > 0), other=-1)
    return position, position - before - 1, tl.load(levels_ptr + k, mask=inside, other=1).to(tl.int32)


@triton.jit
def table_kernel(
    positions_ptr, levels_ptr, list_ptr, order_ptr, size_ptr, base_ptr, cost_ptr, span_ptr, tail_ptr,
    tables_ptr, gap_spans_ptr, level_spans_ptr, rests_ptr, LANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Choose one chunk's tables, and lay what its lane will push beside that of its group's others."""
    slot = tl.program_id(0)
    chunk = tl.load(order_ptr + slot)
    begin = tl.load(list_ptr + chunk)
    count = (tl.load(list_ptr + chunk + 1) - begin).to(tl.int32)
    gap_histogram = tl.zeros([BINS], tl.int32)
    level_histogram = tl.zeros([BINS], tl.int32)
    last = -1
    for first in range(0, count, BLOCK):
        k = first + tl.arange(0, BLOCK)
        inside = k < count
        position, gap, level = _listed(positions_ptr + begin, levels_ptr + begin, k, inside)
        gap_histogram += _count_symbols(symbol_of(gap), inside)
        level_histogram += _count_symbols(symbol_of(tl.abs(level) - 1), inside)
        last = tl.maximum(last, tl.max(tl.where(inside, position, -1), 0))
    tail = tl.load(size_ptr + chunk) - 1 - last
    bins = tl.arange(0, BINS)
    gap_histogram += ((bins == symbol_of(tail)) & (tail > 0)).to(tl.int32)
    gap_table, _ = _cheapest(tl.where(bins < SYMBOLS, gap_histogram, 0), cost_ptr)
    level_table, _ = _cheapest(tl.where(bins < SYMBOLS, level_histogram, 0), cost_ptr)
    tl.store(tail_ptr + chunk, tail)
    tl.store(tables_ptr + chunk, gap_table | (level_table << 7))
    beside = tl.load(base_ptr + slot // LANES) + slot % LANES
    for first in range(0, count, BLOCK):
        k = first + tl.arange(0, BLOCK)
        inside = k < count
        _, gap, level = _listed(positions_ptr + begin, levels_ptr + begin, k, inside)
        gap_symbol, level_symbol = symbol_of(gap), symbol_of(tl.abs(level) - 1)
        gap_span = tl.load(span_ptr + gap_table * SYMBOLS + gap_symbol) | (_extra_bits(gap_symbol) << 24)
        level_span = tl.load(span_ptr + level_table * SYMBOLS + level_symbol)
        level_span = level_span | ((_extra_bits(level_symbol) + 1) << 24)
        rest = ((tl.abs(level) - 1 - _first_value(level_symbol)) << 1) | (level < 0).to(tl.int32)
        rest = (rest << 16) | (gap - _first_value(gap_symbol))
        tl.store(gap_spans_ptr + beside + k * LANES, gap_span, mask=inside)
        tl.store(level_spans_ptr + beside + k * LANES, level_span, mask=inside)
        tl.store(rests_ptr + beside + k * LANES, rest, mask=inside)


@triton.jit
def _spill(x, spills, words_ptr, at, floor):
    """Move 16 bits of the states that spill to their words, backwards."""
    at -= spills.to(tl.int32)
    word = (x & 0xFFFF).to(tl.uint16).to(tl.int16, bitcast=True)
    tl.store(words_ptr + at, word, mask=spills & (at >= floor))
    return tl.where(spills, x >> 16, x), at


@triton.jit
def _push(x, active, span, rest, reciprocal_ptr, words_ptr, at, floor):
    """Push the bits that place a value in its symbol, then the symbol."""
    span = span.to(tl.uint32, bitcast=True)
    freq = span & 4095
    bits = span >> 24
    # 2**32 / freq rounded down gives the quotient or one less.
    reciprocal = tl.load(reciprocal_ptr + freq.to(tl.int32)).to(tl.uint32, bitcast=True)
    # A shift by 32 is not defined, so in two steps; no bits, no spill.
    x, at = _spill(x, active & (((x >> (31 - bits)) >> 1) != 0), words_ptr, at, floor)
    x = tl.where(active, (x << bits) | rest, x)
    x, at = _spill(x, active & (x >= (freq << 20)), words_ptr, at, floor)
    quotient = tl.umulhi(x, reciprocal)
    left = x - quotient * freq
    more = left >= freq
    pushed = (
        ((quotient + more.to(tl.uint32)) << 12) + tl.where(more, left - freq, left) + ((span >> 12) & 4095)
    )
    return tl.where(active, pushed, x), at


@triton.jit
def encode_kernel(
    gap_spans_ptr, level_spans_ptr, rests_ptr, base_ptr, order_ptr, list_ptr, tail_ptr, tables_ptr, span_ptr,
    reciprocal_ptr, words_ptr, floor_ptr, top_ptr, at_ptr, length_ptr, states_ptr, limits_ptr, chunks,
    LANES: tl.constexpr,
):  # fmt: skip
    """Code `LANES` chunks, each backwards from the top of its own words down to its floor at most.

    `limits` receives the words of the longest chunk, and whether one did not have room.
    """
    slot = tl.program_id(0) * LANES + tl.arange(0, LANES)
    live = slot < chunks
    chunk = tl.load(order_ptr + slot, mask=live, other=0)
    count = (tl.load(list_ptr + chunk + 1) - tl.load(list_ptr + chunk)).to(tl.int32)
    count = tl.where(live, count, 0)
    tail = tl.load(tail_ptr + chunk)
    floor = tl.load(floor_ptr + chunk)
    top = tl.load(top_ptr + chunk)
    at = top
    base = tl.load(base_ptr + tl.program_id(0)) + tl.arange(0, LANES)
    gap_state = tl.full([LANES], LOWEST, tl.uint32)
    level_state = tl.full([LANES], LOWEST, tl.uint32)

    ends = (count > 0) & (tail > 0)
    symbol = symbol_of(tl.where(ends, tail, 0))
    span = tl.load(span_ptr + (tl.load(tables_ptr + chunk) & 127) * SYMBOLS + symbol) | (
        _extra_bits(symbol) << 24
    )
    rest = tl.where(ends, tail - _first_value(symbol), 0).to(tl.uint32)
    gap_state, at = _push(gap_state, ends, span, rest, reciprocal_ptr, words_ptr, at, floor)
    i = count - 1
    gap_span = tl.load(gap_spans_ptr + base + i * LANES, mask=i >= 0, other=1)
    level_span = tl.load(level_spans_ptr + base + i * LANES, mask=i >= 0, other=1)
    rest = tl.load(rests_ptr + base + i * LANES, mask=i >= 0, other=0)
    for _ in range(tl.max(count, 0)):
        active = i >= 0
        i -= 1
        # What the next round needs is on its way while this one is worked on.
        next_gap_span = tl.load(gap_spans_ptr + base + i * LANES, mask=i >= 0, other=1)
        next_level_span = tl.load(level_spans_ptr + base + i * LANES, mask=i >= 0, other=1)
        next_rest = tl.load(rests_ptr + base + i * LANES, mask=i >= 0, other=0)
        rest = rest.to(tl.uint32, bitcast=True)
        level_state, at = _push(
            level_state, active, level_span, rest >> 16, reciprocal_ptr, words_ptr, at, floor
        )
        gap_state, at = _push(
            gap_state, active, gap_span, rest & 0xFFFF, reciprocal_ptr, words_ptr, at, floor
        )
        gap_span, level_span, rest = next_gap_span, next_level_span, next_rest
    length = tl.where(count > 0, top - at + 4, 0)
    tl.store(at_ptr + chunk, at, mask=live)
    tl.store(length_ptr + chunk, length, mask=live)
    tl.store(states_ptr + 2 * chunk, gap_state.to(tl.int32, bitcast=True), mask=live)
    tl.store(states_ptr + 2 * chunk + 1, level_state.to(tl.int32, bitcast=True), mask=live)
    tl.atomic_max(limits_ptr, tl.max(tl.where(live, length, 0), 0))
    tl.atomic_max(limits_ptr + 1, tl.max((live & (at < floor)).to(tl.int32), 0))


@triton.jit
def pack_kernel(
    words_ptr, at_ptr, length_ptr, end_ptr, states_ptr, tables_ptr, limits_ptr, headers_ptr, out_ptr,
    summary_ptr, chunks, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write one chunk's header, states and words to their places in the stream.

    Nothing is written where a chunk was longer than its room. The last chunk reports.
    """
    chunk = tl.program_id(0)
    short = tl.load(limits_ptr + 1)
    length = tl.where(short == 0, tl.load(length_ptr + chunk), 0)
    end = tl.load(end_ptr + chunk)
    tables = tl.load(tables_ptr + chunk)
    tl.store(headers_ptr + chunk, tl.where(length > 0, length | (tables << 18), 0))
    if length > 0:
        out = end - length
        k = tl.arange(0, 4)
        state = tl.load(states_ptr + 2 * chunk + k // 2).to(tl.uint32, bitcast=True)
        half = tl.where(k % 2 == 0, state & 0xFFFF, state >> 16)
        tl.store(out_ptr + out + k, half.to(tl.uint16).to(tl.int16, bitcast=True))
        at = tl.load(at_ptr + chunk)
        for first in range(0, length - 4, BLOCK):
            i = first + tl.arange(0, BLOCK)
            word = tl.load(words_ptr + at + i, mask=i < length - 4)
            tl.store(out_ptr + out + 4 + i, word, mask=i < length - 4)
    if chunk == chunks - 1:
        tl.store(summary_ptr, end)
        tl.store(summary_ptr + 1, tl.load(limits_ptr).to(tl.int64))
        tl.store(summary_ptr + 2, short.to(tl.int64))


@triton.jit
def _word(words_ptr, at, last, wanted):
    """Load the next word of each lane; past the end it is the last one again."""
    word = tl.load(words_ptr + tl.minimum(at, last), mask=wanted, other=0)
    return word.to(tl.uint16, bitcast=True).to(tl.uint32)


@triton.jit
def _refill(x, active, word, after, words_ptr, at, last):
    """Give 16 bits to the states that are short; the word after the next is already on its way."""
    short = active & (x < LOWEST)
    x = tl.where(short, (x << 16) | word, x)
    at += short.to(at.dtype)
    return x, tl.where(short, after, word), tl.where(short, _word(words_ptr, at + 1, last, short), after), at


@triton.jit
def _pop(x, active, slot_ptr, span_ptr, table, word, after, words_ptr, at, last):
    # Two small tables, which stay in the nearest cache, beat one large one.
    symbol = tl.load(slot_ptr + table * 4096 + (x & 4095).to(tl.int32), mask=active, other=0).to(tl.int32)
    span = tl.load(span_ptr + table * SYMBOLS + symbol).to(tl.uint32, bitcast=True)
    x = tl.where(active, (span & 4095) * (x >> 12) + (x & 4095) - (span >> 12), x)
    x, word, after, at = _refill(x, active, word, after, words_ptr, at, last)
    return x, word, after, at, symbol


@triton.jit
def _pop_bits(x, active, bits, word, after, words_ptr, at, last):
    value = x & ((1 << bits) - 1).to(tl.uint32)
    x = tl.where(active, x >> bits.to(tl.uint32), x)
    x, word, after, at = _refill(x, active, word, after, words_ptr, at, last)
    return x, word, after, at, value.to(tl.int32)


@triton.jit
def decode_kernel(
    words_ptr, headers_ptr, first_ptr, order_ptr, start_ptr, size_ptr, slot_ptr, span_ptr, codes_ptr,
    damage_ptr, chunks, LANES: tl.constexpr,
):  # fmt: skip
    """Decode `LANES` chunks into a cleared buffer of codes; count the damaged ones."""
    slot = tl.program_id(0) * LANES + tl.arange(0, LANES)
    live = slot < chunks
    chunk = tl.load(order_ptr + slot, mask=live, other=0)
    header = tl.load(headers_ptr + chunk, mask=live, other=0).to(tl.uint32, bitcast=True)
    length = (header & 0x3FFFF).to(tl.int32)
    gap_table = ((header >> 18) & 127).to(tl.int32)
    level_table = (header >> 25).to(tl.int32)
    first = tl.load(first_ptr + chunk, mask=live, other=0)
    start = tl.load(start_ptr + chunk, mask=live, other=0)
    size = tl.load(size_ptr + chunk, mask=live, other=0)
    damaged = live & (length > 0) & (length < 4)
    active = live & (length >= 4)
    last = first + length - 1
    gap_state = _word(words_ptr, first, last, active) | (_word(words_ptr, first + 1, last, active) << 16)
    level_state = _word(words_ptr, first + 2, last, active) | (
        _word(words_ptr, first + 3, last, active) << 16
    )
    damaged |= active & ((gap_state < LOWEST) | (level_state < LOWEST))
    checked = active & ~damaged
    active = checked
    at = first + 4
    word = _word(words_ptr, at, last, active)
    after = _word(words_ptr, at + 1, last, active)
    position = tl.zeros([LANES], tl.int32)
    while tl.max(active.to(tl.int32), 0) > 0:
        gap_state, word, after, at, symbol = _pop(
            gap_state, active, slot_ptr, span_ptr, gap_table, word, after, words_ptr, at, last
        )
        gap_state, word, after, at, rest = _pop_bits(
            gap_state, active, _extra_bits(symbol), word, after, words_ptr, at, last
        )
        position += tl.where(active, _first_value(symbol) + rest, 0)
        active = active & (position < size)
        level_state, word, after, at, symbol = _pop(
            level_state, active, slot_ptr, span_ptr, level_table, word, after, words_ptr, at, last
        )
        level_state, word, after, at, rest = _pop_bits(
            level_state, active, _extra_bits(symbol) + 1, word, after, words_ptr, at, last
        )
        level = _first_value(symbol) + (rest >> 1) + 1
        damaged |= active & (level > MAX_LEVEL)
        active = active & ~damaged
        level = tl.where((rest & 1) != 0, -level, level)
        tl.store(codes_ptr + start + position, level.to(tl.int16), mask=active)
        position += active.to(tl.int32)
        active = active & (position < size)
    whole = (position == size) & (at == first + length) & (gap_state == LOWEST) & (level_state == LOWEST)
    damaged |= checked & ~whole
    tl.atomic_add(damage_ptr, tl.sum(damaged.to(tl.int32), 0))
