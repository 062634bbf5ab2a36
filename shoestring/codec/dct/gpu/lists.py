"""Triton kernels that list codes and price them: which tables a chunk or a sample takes.

All of it is done for many codes at once, so that what is left to walk one code after the
other (`entropy.py`) is short: a chunk's list holds its codes other than 0 alone.

An item of a list is a code's place in its chunk above 16 bits, and the code below. So a
chunk that is listed here has at most 2**16 places, and no gap or level is beyond symbol 31.
"""

import triton
import triton.language as tl

from shoestring.codec.dct.gpu.launch import kernel
from shoestring.codec.dct.gpu.transform import to_codes

ROUNDING = tl.constexpr(11 / 32)
BINS = tl.constexpr(32)
TABLES = tl.constexpr(128)
COST_DIGIT = tl.constexpr(64)
FOUR = tl.constexpr(4)
# Rows of the notes on chunks. The chosen tables are two a chunk, for gaps and for levels.
COUNT, LENGTH, CHOSEN, NOTES = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(4)


@triton.jit
def symbol_of(value):
    """Itself below 2, two an octave above: exponent and top bit of the value as a float."""
    return tl.where(value < 2, value, (value.to(tl.float32).to(tl.int32, bitcast=True) >> 22) - 254)


@triton.jit
def place_of(item):
    return (item.to(tl.uint32, bitcast=True) >> 16).to(tl.int32)


@triton.jit
def code_of(item):
    return (item << 16) >> 16


@triton.jit
def _within(place, size):
    """Say whether 0 <= place < size."""
    return place.to(tl.uint32, bitcast=True) < size.to(tl.uint32, bitcast=True)


@triton.jit
def _extra_bits(symbol):
    return tl.maximum((symbol >> 1) - 1, 0)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _cheapest(histogram, cost_ptr):
    """Return the least that any table costs, in 1/256 bit, for a histogram [BINS]."""
    at = cost_ptr + tl.arange(0, BINS)[:, None] * TABLES + tl.arange(0, TABLES)[None, :]
    cost = (tl.load(at + BINS * TABLES).to(tl.int32) * COST_DIGIT) + tl.load(at).to(tl.int32)
    return tl.min(tl.sum(cost * histogram[:, None], 0), 0)


@triton.jit
def _count_symbols(symbol, counted):
    """Return how often each symbol is counted; what is not counted is taken off the first again."""
    others = tl.sum((~counted).to(tl.int32), 0)
    histogram = tl.histogram(tl.where(counted, symbol, 0), BINS)
    return histogram - tl.where(tl.arange(0, BINS) == 0, others, 0)


@kernel
def cost_kernel(
    c_ptr, start_ptr, size_ptr, tensor_ptr, rms_ptr, relative_ptr, cost_ptr, result_ptr, BLOCK: tl.constexpr
):
    """Say how many bits a value a sample would take at a step over rms, and its error in steps."""
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
    cost = _cheapest(gap_histogram, cost_ptr) + _cheapest(level_histogram, cost_ptr)
    items = tl.num_programs(0) * tl.num_programs(1)
    values = tl.maximum(size, 1).to(tl.float64)
    tl.store(result_ptr + item, (tl.sum(bits, 0) + cost.to(tl.float32) / 256).to(tl.float64) / values)
    tl.store(result_ptr + items + item, tl.sum(error, 0).to(tl.float64) / values)


@kernel
def list_kernel(
    fours_ptr, order_ptr, start_ptr, size_ptr, marks_ptr, items_ptr, notes_ptr, histograms_ptr, chunks,
    BLOCK: tl.constexpr, LIST: tl.constexpr,
):  # fmt: skip
    """List one chunk's codes where the chunk lies, note how many, and count their symbols.

    Codes are read by fours, aligned, also where a chunk begins or ends within one. Most are 0: so the
    fours that are not are marked first, and only those are taken apart.
    """
    chunk = tl.load(order_ptr + tl.program_id(0))
    start = tl.load(start_ptr + chunk)
    size = tl.load(size_ptr + chunk)
    before = (start % FOUR).to(tl.int32)
    limit = tl.cdiv(before + size, FOUR)
    fours = fours_ptr + start // FOUR
    marks = marks_ptr + start // FOUR + chunk  # chunks may share a four
    items = items_ptr + start
    k = tl.arange(0, BLOCK)
    four = tl.load(fours + k, mask=k < limit, other=0)
    marked = 0
    for first in range(0, limit, BLOCK):
        ahead = first + BLOCK + k
        next_four = tl.load(fours + ahead, mask=ahead < limit, other=0)
        is_marked = (four != 0).to(tl.int32)
        at = marked + tl.cumsum(is_marked, 0) - is_marked
        tl.store(marks + at, (first + k).to(tl.int16), mask=four != 0)
        marked += tl.sum(is_marked, 0)
        four = next_four
    tl.debug_barrier()  # the marks were written by other threads

    count = 0
    for first in range(0, marked, LIST):
        i = first + tl.arange(0, LIST)
        mark = tl.load(marks + i, mask=i < marked, other=0).to(tl.int32)
        both = tl.load(fours + mark, mask=i < marked, other=0)
        a = both.to(tl.int32)
        b = (both >> 32).to(tl.int32)
        place = FOUR * mark - before
        c0 = tl.where(_within(place, size), a & 0xFFFF, 0)
        c1 = tl.where(_within(place + 1, size), place_of(a), 0)
        c2 = tl.where(_within(place + 2, size), b & 0xFFFF, 0)
        c3 = tl.where(_within(place + 3, size), place_of(b), 0)
        two = (c0 != 0).to(tl.int32) + (c1 != 0).to(tl.int32)
        codes = two + (c2 != 0).to(tl.int32) + (c3 != 0).to(tl.int32)
        at = items + (count + tl.cumsum(codes, 0) - codes)
        tl.store(at, (place << 16) | c0, mask=c0 != 0)
        tl.store(at + (c0 != 0).to(tl.int32), ((place + 1) << 16) | c1, mask=c1 != 0)
        tl.store(at + two, ((place + 2) << 16) | c2, mask=c2 != 0)
        tl.store(at + two + (c2 != 0).to(tl.int32), ((place + 3) << 16) | c3, mask=c3 != 0)
        count += tl.sum(codes, 0)
    tl.debug_barrier()  # and so was the list

    tail = size - 1 - place_of(tl.load(items + count - 1, mask=count > 0, other=0))
    bins = tl.arange(0, BINS)
    gap_histogram = ((bins == symbol_of(tail)) & (tail > 0)).to(tl.int32)
    level_histogram = tl.zeros([BINS], tl.int32)
    for first in range(0, count, LIST):
        i = first + tl.arange(0, LIST)
        inside = i < count
        item = tl.load(items + i, mask=inside, other=0)
        earlier = tl.load(items + i - 1, mask=inside & (i > 0), other=0)
        gap = place_of(item) - tl.where(i > 0, place_of(earlier), -1) - 1
        gap_histogram += _count_symbols(symbol_of(gap), inside)
        level_histogram += _count_symbols(symbol_of(tl.abs(code_of(item)) - 1), inside)
    tl.store(histograms_ptr + 2 * BINS * chunk + bins, gap_histogram)
    tl.store(histograms_ptr + 2 * BINS * chunk + BINS + bins, level_histogram)
    tl.store(notes_ptr + COUNT * chunks + chunk, count)


@triton.jit
def _price(counts, cost_ptr):
    """Return what each table would cost [histograms, TABLES], for counts below 2**11.

    Counts and digits of costs are exact as float16, and their sums as float32.
    """
    counts = counts.to(tl.float16)
    at = cost_ptr + tl.arange(0, BINS)[:, None] * TABLES + tl.arange(0, TABLES)[None, :]
    low = tl.dot(counts, tl.load(at)).to(tl.int32)
    return low + tl.dot(counts, tl.load(at + BINS * TABLES)).to(tl.int32) * COST_DIGIT


@kernel
def table_kernel(histograms_ptr, cost_ptr, notes_ptr, chunks, ROWS: tl.constexpr):
    """Choose the tables that cost least, of equals the first, for `ROWS` histograms of gaps or levels."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = row < 2 * chunks
    at = histograms_ptr + row[:, None] * BINS + tl.arange(0, BINS)[None, :]
    counts = tl.load(at, mask=live[:, None], other=0)
    price = _price(counts & 1023, cost_ptr)
    if tl.max(tl.max(counts, 1), 0) > 1023:
        price += _price(counts >> 10, cost_ptr) * 1024
    tl.store(notes_ptr + CHOSEN * chunks + row, tl.argmin(price, 1), mask=live)
