"""Triton kernels for values and codes: scan, transform, quantise, and back.

A block of n x n values is a row of `AREA` numbers, and the transform one matrix product
with the Kronecker square of the basis, so that tensor cores do it. `D` is the area padded
to a power of two of at least 16. Forward it is a product of float16 numbers, values in steps:
coefficients are good to about 2**-10 of their block's norm, which moves a few codes that lie
on an edge. Backward it must be exact: basis and codes are cut into digits that float16 holds,
so few bits each that tensor cores add up their products without loss. Where the codes of every
block are small, the digits join in float32; elsewhere in int32, which wraps as on the CPU.

Codes lie in planar order in a buffer as long as the bucket, each tile's where its values are.
A program transforms a group of blocks of one tile; `places.Groups` says what a row of `groups`
holds. `ALIGN` and `PLANE` divide the places and sizes of all groups, among values and among
codes: what they promise decides how much a thread can load at once.
"""

import triton
import triton.language as tl

from shoestring.codec.dct.gpu.launch import kernel

MAGNITUDE_BITS = tl.constexpr(0x7FFFFFFF)
MAX_LEVEL = tl.constexpr(32767)
ROUNDING = tl.constexpr(11 / 32)
ROUNDING_BITS = tl.constexpr(0x3EB00000)
SIGN_BIT = tl.constexpr(-0x80000000)
INVERSE_SHIFT = tl.constexpr(12)
IDENTITY_SHIFT = tl.constexpr(18)
MIDDLE = tl.constexpr(1.5 * 2**23)  # floats around it are whole, and their last bits count
MIDDLE_BITS = tl.constexpr(0x4B400000)
DIGIT = tl.constexpr(512)
SET, ADD, SUBTRACT = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)

# Columns of `places.Groups.rows`.
START, PLANE_START, STRIDE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
BLOCKS, TENSOR, GROUP = tl.constexpr(3), tl.constexpr(4), tl.constexpr(5)
# Columns of `steps.Steps`.
INVERSE, THRESHOLD, MAGIC = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
MANTISSA, SCALE, STEP = tl.constexpr(3), tl.constexpr(4), tl.constexpr(8)


@kernel
def scan_kernel(x_ptr, start_ptr, size_ptr, sums_ptr, segments, BLOCK: tl.constexpr):
    """Sum the squares and find the largest magnitude (as bits) of one segment: two rows of `sums`."""
    pid = tl.program_id(0)
    start = tl.load(start_ptr + pid)
    size = tl.load(size_ptr + pid)
    energy = tl.zeros([BLOCK], tl.float64)
    top = tl.zeros([BLOCK], tl.int32)
    for first in range(0, size, BLOCK):
        k = first + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + start + k, mask=k < size, other=0.0)
        wide = x.to(tl.float64)
        energy += wide * wide
        top = tl.maximum(top, x.to(tl.int32, bitcast=True) & MAGNITUDE_BITS)
    tl.store(sums_ptr + pid, tl.sum(energy, 0))
    tl.store(sums_ptr + segments + pid, tl.max(top, 0).to(tl.float64))


@kernel
def sum_kernel(sums_ptr, begin_ptr, size_ptr, results_ptr, rms_ptr, segments, tensors, BLOCK: tl.constexpr):
    """Add up one tensor's segments, always in the same order: two rows of `results`, and the rms."""
    tensor = tl.program_id(0)
    begin = tl.load(begin_ptr + tensor)
    end = tl.load(begin_ptr + tensor + 1)
    energy = tl.zeros([BLOCK], tl.float64)
    top = tl.zeros([BLOCK], tl.float64)
    for first in range(begin, end, BLOCK):
        k = first + tl.arange(0, BLOCK)
        energy += tl.load(sums_ptr + k, mask=k < end, other=0.0)
        top = tl.maximum(top, tl.load(sums_ptr + segments + k, mask=k < end, other=0.0))
    total = tl.sum(energy, 0)
    tl.store(results_ptr + tensor, total)
    largest = tl.max(top, 0).to(tl.int32).to(tl.float32, bitcast=True)
    tl.store(results_ptr + tensors + tensor, largest.to(tl.float64))
    mean = (total / tl.maximum(tl.load(size_ptr + tensor), 1)).to(tl.float32)
    tl.store(rms_ptr + tensor, tl.sqrt(mean))


@triton.jit
def to_codes(c, threshold, inverse_step):
    """Quantise with a dead zone."""
    magnitude = tl.abs(c)
    level = tl.minimum(magnitude * inverse_step + ROUNDING, MAX_LEVEL * 1.0).to(tl.int32)
    level = tl.where(magnitude >= threshold, tl.maximum(level, 1), 0)
    return tl.where(c < 0, -level, level)


@triton.jit
def _to_int(x):
    """Convert a whole float32 below 2**22, faster than a conversion does.

    A difference, as Triton makes a sum part of the product that x is. Tensor cores would then have
    to be exact for more bits than the digits have, and an H200 was seen to decode other bits.
    """
    return (x - -MIDDLE).to(tl.int32, bitcast=True) - MIDDLE_BITS


@triton.jit
def _to_float(k):
    """Undo `_to_int`."""
    return (k + MIDDLE_BITS).to(tl.float32, bitcast=True) - MIDDLE


@triton.jit
def _rounded(y):
    """Return (y + 2048) >> 12 as a float, without the overflow near the end of int32."""
    return _to_float((y >> INVERSE_SHIFT) + ((y >> (INVERSE_SHIFT - 1)) & 1))


@triton.jit
def _unit(step):
    """Return what rounded integers are multiplied by: 5 bits and a power of two, so exactly."""
    return tl.load(step + MANTISSA) * tl.load(step + SCALE)


@triton.jit
def _round_to_codes(c, AREA: tl.constexpr):
    """Quantise coefficients in steps, with a dead zone: towards zero after 11/32 away from it."""
    bias = (c.to(tl.int32, bitcast=True) & SIGN_BIT) | ROUNDING_BITS
    c += bias.to(tl.float32, bitcast=True)
    if AREA > 64:  # n * 2048 steps are more than a code can say
        c = tl.minimum(tl.maximum(c, -1.0 * MAX_LEVEL), 1.0 * MAX_LEVEL)
    return c.to(tl.int16)


@kernel
def forward_kernel(
    x_ptr, out_ptr, groups_ptr, steps_ptr, matrix_ptr,
    AREA: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr, B: tl.constexpr,
    ALIGN: tl.constexpr, PLANE: tl.constexpr, COEFFICIENTS: tl.constexpr,
):  # fmt: skip
    """Transform and quantise a group of blocks; write codes, or coefficients as they are."""
    group = groups_ptr + tl.program_id(0) * GROUP
    start = tl.multiple_of(tl.load(group + START), ALIGN)
    out_start = tl.multiple_of(tl.load(group + PLANE_START), PLANE)
    stride = tl.multiple_of(tl.load(group + STRIDE), PLANE)
    blocks = tl.multiple_of(tl.load(group + BLOCKS), PLANE)
    step = steps_ptr + tl.load(group + TENSOR) * STEP
    b = tl.arange(0, B)
    f = tl.program_id(1) * TILE + tl.arange(0, TILE)
    c = tl.zeros([TILE, B], tl.float32)
    for first in range(0, D, TILE):
        k = first + tl.arange(0, TILE)
        inside = (b < blocks)[:, None]
        if AREA < D:
            inside = inside & (k < AREA)[None, :]
        x = tl.load(x_ptr + start + b[:, None] * AREA + k[None, :], mask=inside, other=0.0)
        matrix = tl.load(matrix_ptr + f[:, None] * D + k[None, :])
        if COEFFICIENTS:
            c = tl.dot(matrix.to(tl.float32), tl.trans(x), c, input_precision="tf32")
        else:
            magic = tl.load(step + MAGIC)
            x = ((x + magic) - magic) * tl.load(step + INVERSE)
            c = tl.dot(matrix, tl.trans(x.to(tl.float16)), c)
    planar = out_start + f[:, None] * stride + b[None, :]
    inside = (b < blocks)[None, :]
    if AREA < D:
        inside = inside & (f < AREA)[:, None]
    if COEFFICIENTS:
        tl.store(out_ptr + planar, c, mask=inside)
    else:
        tl.store(out_ptr + planar, _round_to_codes(c, AREA), mask=inside)


@triton.jit
def _load_codes(codes, stride, blocks, first, AREA: tl.constexpr, TILE: tl.constexpr, B: tl.constexpr):
    """Load `TILE` frequencies of a group: [frequency, block]."""
    f = first + tl.arange(0, TILE)
    b = tl.arange(0, B)
    inside = (b < blocks)[None, :]
    if AREA % TILE != 0:
        inside = inside & (f < AREA)[:, None]
    return tl.load(codes + f[:, None] * stride + b[None, :], mask=inside, other=0).to(tl.int32)


@triton.jit
def _places(usable, AREA: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr, B: tl.constexpr):
    """Return where in its group each value of [block, place] lies, and which of them are there."""
    b = tl.arange(0, B)[:, None]
    place = (tl.program_id(1) * TILE + tl.arange(0, TILE))[None, :]
    inside = b < usable
    if AREA < D:
        inside = inside & (place < AREA)
    return b * AREA + place, inside


@triton.jit
def _change(x, value, step, weight, MODE: tl.constexpr):
    """Return the value (SET), `x` plus the value (ADD) or `x` less the value (SUBTRACT)."""
    if MODE == ADD:
        value = x + weight * value
    elif MODE == SUBTRACT:
        magic = tl.load(step + MAGIC)
        value = ((x + magic) - magic) - value
    return value


@kernel
def inverse_kernel(
    codes_ptr, x_ptr, out_ptr, damage_ptr, hard_ptr, groups_ptr, steps_ptr, basis_ptr, weight,
    AREA: tl.constexpr, D: tl.constexpr, B: tl.constexpr, SMALL: tl.constexpr,
    ALIGN: tl.constexpr, PLANE: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """Turn a group of blocks back into values: set them, add them, or subtract them from `x`.

    Nothing is written if the stream is damaged, nor to blocks without codes when adding. A group with
    a block whose codes add up to more than `SMALL` is noted as hard and left to `wrapping_kernel`; that
    there is one is noted behind all groups.
    """
    group = groups_ptr + tl.program_id(0) * GROUP
    start = tl.multiple_of(tl.load(group + START), ALIGN)
    codes = codes_ptr + tl.multiple_of(tl.load(group + PLANE_START), PLANE)
    stride = tl.multiple_of(tl.load(group + STRIDE), PLANE)
    blocks = tl.multiple_of(tl.load(group + BLOCKS), PLANE)
    step = steps_ptr + tl.load(group + TENSOR) * STEP
    q = _load_codes(codes, stride, blocks, 0, AREA, D, B)
    total = tl.sum(tl.abs(q), 0)
    hard = tl.max(total, 0) > SMALL
    tl.store(hard_ptr + tl.program_id(0), 1, mask=hard)
    tl.store(hard_ptr + tl.num_programs(0), 1, mask=hard)
    at, inside = _places(tl.where((tl.load(damage_ptr) != 0) | hard, 0, blocks), AREA, D, D, B)
    if MODE == ADD:
        inside = inside & (total > 0)[:, None]
    x = tl.zeros([B, D], tl.float32)
    if MODE != SET:  # under way during the products
        x = tl.load(x_ptr + start + at, mask=inside, other=0.0)
    basis = basis_ptr + tl.arange(0, D)[:, None] * D + tl.arange(0, D)[None, :]
    q = tl.trans(_to_float(q).to(tl.float16))
    # Negative, to be a difference: a sum would become part of a product (`_to_int`).
    y = tl.dot(q, tl.load(basis)) * -DIGIT - tl.dot(q, tl.load(basis + D * D))
    # The nearest whole number to -y / 4096; what was half way between two is nearer to the larger.
    rounded = ((y * (-1 / 4096) + 1 / 8192) + MIDDLE) - MIDDLE
    tl.store(out_ptr + start + at, _change(x, rounded * _unit(step), step, weight, MODE), mask=inside)


@triton.jit
def _wrapping_sums(
    codes, stride, blocks, basis_ptr, AREA: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr, B: tl.constexpr
):
    """Return the sums of codes times the basis in int32, and those of their magnitudes."""
    k = tl.arange(0, TILE)
    basis = basis_ptr + k[:, None] * D + (tl.program_id(1) * TILE + k)[None, :]
    y = tl.zeros([B, TILE], tl.int32)
    total = tl.zeros([B], tl.int32)
    for first in range(0, D, TILE):
        q = _load_codes(codes, stride, blocks, first, AREA, TILE, B)
        total += tl.sum(tl.abs(q), 0)
        high = tl.load(basis + first * D)
        low = tl.load(basis + first * D + D * D)
        upper = (q + 128) >> 8
        lower = tl.trans(_to_float(q - (upper << 8)).to(tl.float16))
        y += (_to_int(tl.dot(lower, high)) << 9) + _to_int(tl.dot(lower, low))
        if tl.max(tl.max(tl.abs(upper), 1), 0) > 0:  # codes beyond a byte are rare
            beyond = tl.trans(_to_float(upper).to(tl.float16))
            y += (_to_int(tl.dot(beyond, high)) << 17) + (_to_int(tl.dot(beyond, low)) << 8)
    return y, total


@kernel
def wrapping_kernel(
    codes_ptr, x_ptr, out_ptr, damage_ptr, hard_ptr, groups_ptr, steps_ptr, basis_ptr, weight, count,
    AREA: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr, B: tl.constexpr,
    ALIGN: tl.constexpr, PLANE: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """Like `inverse_kernel`, for groups whose codes are too large for its arithmetic."""
    if tl.load(hard_ptr + count) == 0:
        return
    for index in range(tl.program_id(0), count, tl.num_programs(0)):
        if tl.load(hard_ptr + index) != 0:
            group = groups_ptr + index * GROUP
            start = tl.multiple_of(tl.load(group + START), ALIGN)
            codes = codes_ptr + tl.multiple_of(tl.load(group + PLANE_START), PLANE)
            stride = tl.multiple_of(tl.load(group + STRIDE), PLANE)
            blocks = tl.multiple_of(tl.load(group + BLOCKS), PLANE)
            step = steps_ptr + tl.load(group + TENSOR) * STEP
            y, total = _wrapping_sums(codes, stride, blocks, basis_ptr, AREA, D, TILE, B)
            at, inside = _places(tl.where(tl.load(damage_ptr) != 0, 0, blocks), AREA, D, TILE, B)
            if MODE == ADD:
                inside = inside & (total > 0)[:, None]
            x = tl.zeros([B, TILE], tl.float32)
            if MODE != SET:
                x = tl.load(x_ptr + start + at, mask=inside, other=0.0)
            value = _change(x, _rounded(y) * _unit(step), step, weight, MODE)
            tl.store(out_ptr + start + at, value, mask=inside)


@kernel
def quantise_kernel(
    x_ptr, codes_ptr, left_over_ptr, start_ptr, size_ptr, tensor_ptr, steps_ptr,
    ALIGN: tl.constexpr, WANTS_LEFT_OVER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Quantise values without a transform: tensors that have none, and rests."""
    pid = tl.program_id(0)
    k = tl.arange(0, BLOCK)
    inside = k < tl.multiple_of(tl.load(size_ptr + pid), ALIGN)
    at = tl.multiple_of(tl.load(start_ptr + pid), ALIGN) + k
    step = steps_ptr + tl.load(tensor_ptr + pid) * STEP
    magic = tl.load(step + MAGIC)
    x = (tl.load(x_ptr + at, mask=inside, other=0.0) + magic) - magic
    q = to_codes(x, tl.load(step + THRESHOLD), tl.load(step + INVERSE))
    tl.store(codes_ptr + at, q.to(tl.int16), mask=inside)
    if WANTS_LEFT_OVER:
        sent = _rounded(q << IDENTITY_SHIFT) * _unit(step)
        tl.store(left_over_ptr + at, x - sent, mask=inside)


@kernel
def identity_kernel(
    codes_ptr, out_ptr, damage_ptr, start_ptr, size_ptr, tensor_ptr, steps_ptr, weight,
    ALIGN: tl.constexpr, MODE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The inverse for values without a transform."""
    pid = tl.program_id(0)
    k = tl.arange(0, BLOCK)
    size = tl.multiple_of(tl.load(size_ptr + pid), ALIGN)
    inside = k < tl.where(tl.load(damage_ptr) == 0, size, 0)
    at = tl.multiple_of(tl.load(start_ptr + pid), ALIGN) + k
    step = steps_ptr + tl.load(tensor_ptr + pid) * STEP
    q = tl.load(codes_ptr + at, mask=inside, other=0).to(tl.int32)
    value = _rounded(q << IDENTITY_SHIFT) * _unit(step)
    if MODE == ADD:
        inside = inside & (q != 0)
        before = tl.load(out_ptr + at, mask=inside, other=0.0)
        tl.store(out_ptr + at, before + weight * value, mask=inside)
    else:
        tl.store(out_ptr + at, value, mask=inside)


@kernel
def gather_kernel(x_ptr, out_ptr, start_ptr, out_start_ptr, size_ptr, BLOCK: tl.constexpr):
    """Copy one segment."""
    pid = tl.program_id(0)
    k = tl.arange(0, BLOCK)
    inside = k < tl.load(size_ptr + pid)
    x = tl.load(x_ptr + tl.load(start_ptr + pid) + k, mask=inside)
    tl.store(out_ptr + tl.load(out_start_ptr + pid) + k, x, mask=inside)


@kernel
def add_kernel(x_ptr, out_ptr, start_ptr, out_start_ptr, size_ptr, damage_ptr, weight, BLOCK: tl.constexpr):
    """Add one segment times `weight`."""
    pid = tl.program_id(0)
    k = tl.arange(0, BLOCK)
    inside = k < tl.where(tl.load(damage_ptr) == 0, tl.load(size_ptr + pid), 0)
    x = tl.load(x_ptr + tl.load(start_ptr + pid) + k, mask=inside, other=0.0)
    at = tl.load(out_start_ptr + pid) + k
    before = tl.load(out_ptr + at, mask=inside, other=0.0)
    tl.store(out_ptr + at, before + weight * x, mask=inside)


@kernel
def floats_kernel(
    x_ptr, out_ptr, left_over_ptr, start_ptr, out_start_ptr, size_ptr, scale_ptr,
    WANTS_LEFT_OVER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write one segment as float16 over its scale, or as float32 where the scale is 0."""
    pid = tl.program_id(0)
    k = tl.arange(0, BLOCK)
    inside = k < tl.load(size_ptr + pid)
    at = tl.load(start_ptr + pid) + k
    scale = tl.load(scale_ptr + pid)
    x = tl.load(x_ptr + at, mask=inside, other=0.0)
    out = out_ptr + tl.load(out_start_ptr + pid)
    sent = x
    if scale == 0:
        bits = x.to(tl.int32, bitcast=True)
        tl.store(out + 2 * k, (bits & 0xFFFF).to(tl.uint16).to(tl.int16, bitcast=True), mask=inside)
        tl.store(out + 2 * k + 1, (bits >> 16).to(tl.int16), mask=inside)
    else:
        half = (x * (1.0 / scale)).to(tl.float16)
        tl.store(out + k, half.to(tl.int16, bitcast=True), mask=inside)
        sent = half.to(tl.float32) * scale
    if WANTS_LEFT_OVER:
        tl.store(left_over_ptr + at, x - sent, mask=inside)
