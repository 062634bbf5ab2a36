"""Triton kernels for values and codes: scan, transform, quantise, and back.

A block of n x n values is a row of `AREA` numbers, and the transform one matrix product
with the Kronecker square of the basis, so that tensor cores do it. `D` is the area padded
to a power of two of at least 16. Forward it is a TF32 product: coefficients are good to
about 2**-10 of their block's norm, which moves a few codes that lie on an edge. Backward it
must be exact: codes and basis are cut into digits small enough for float16, and each product
of digits sums to less than 2**24, which float32 holds exactly; the parts join in int32, which
wraps as it does on the CPU.

Codes lie in planar order in a buffer as long as the bucket, each tile's where its values are.
"""

import triton
import triton.language as tl

MAGNITUDE_BITS = tl.constexpr(0x7FFFFFFF)
MAX_LEVEL = tl.constexpr(32767)
ROUNDING = tl.constexpr(11 / 32)
INVERSE_SHIFT = tl.constexpr(12)
IDENTITY_SHIFT = tl.constexpr(18)
SET, ADD, KEEP = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def scan_kernel(x_ptr, start_ptr, size_ptr, energy_ptr, top_ptr, BLOCK: tl.constexpr):
    """Sum the squares and find the largest magnitude (as bits) of one segment."""
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
    tl.store(energy_ptr + pid, tl.sum(energy, 0))
    tl.store(top_ptr + pid, tl.max(top, 0).to(tl.float64))


@triton.jit
def sum_kernel(energy_ptr, top_ptr, begin_ptr, size_ptr, results_ptr, rms_ptr, tensors, BLOCK: tl.constexpr):
    """Add up one tensor's segments, always in the same order."""
    tensor = tl.program_id(0)
    begin = tl.load(begin_ptr + tensor)
    end = tl.load(begin_ptr + tensor + 1)
    energy = tl.zeros([BLOCK], tl.float64)
    top = tl.zeros([BLOCK], tl.float64)
    for first in range(begin, end, BLOCK):
        k = first + tl.arange(0, BLOCK)
        energy += tl.load(energy_ptr + k, mask=k < end, other=0.0)
        top = tl.maximum(top, tl.load(top_ptr + k, mask=k < end, other=0.0))
    total = tl.sum(energy, 0)
    tl.store(results_ptr + tensor, total)
    tl.store(results_ptr + tensors + tensor, tl.max(top, 0))
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
def _to_values(y, mantissa, scale):
    # (y + 2048) >> 12, without the overflow near the end of int32
    return (((y >> INVERSE_SHIFT) + ((y >> (INVERSE_SHIFT - 1)) & 1)) * mantissa).to(tl.float32) * scale


@triton.jit
def forward_kernel(
    x_ptr, out_ptr, group_tile_ptr, group_first_ptr, start_ptr, blocks_ptr, out_start_ptr, out_stride_ptr,
    tensor_ptr, inverse_ptr, threshold_ptr, magic_ptr, matrix_ptr,
    AREA: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr, B: tl.constexpr, COEFFICIENTS: tl.constexpr,
):  # fmt: skip
    """Transform and quantise a group of blocks; write codes, or coefficients as they are."""
    pid = tl.program_id(0)
    tile = tl.load(group_tile_ptr + pid)
    blocks = tl.load(blocks_ptr + tile)
    tensor = tl.load(tensor_ptr + tile)
    start = tl.load(start_ptr + tile)
    magic = tl.load(magic_ptr + tensor)
    b = tl.load(group_first_ptr + pid) + tl.arange(0, B)
    f = tl.program_id(1) * TILE + tl.arange(0, TILE)
    c = tl.zeros([B, TILE], tl.float32)
    for first in range(0, D, TILE):
        k = first + tl.arange(0, TILE)
        inside = (b < blocks)[:, None] & (k < AREA)[None, :]
        x = tl.load(x_ptr + start + b[:, None] * AREA + k[None, :], mask=inside, other=0.0)
        x = (x + magic) - magic
        matrix = tl.load(matrix_ptr + k[:, None] * D + f[None, :])
        c = tl.dot(x, matrix, c, input_precision="tf32")
    planar = tl.load(out_start_ptr + tile) + f[None, :] * tl.load(out_stride_ptr + tile) + b[:, None]
    inside = (b < blocks)[:, None] & (f < AREA)[None, :]
    if COEFFICIENTS:
        tl.store(out_ptr + planar, c, mask=inside)
    else:
        q = to_codes(c, tl.load(threshold_ptr + tensor), tl.load(inverse_ptr + tensor))
        tl.store(out_ptr + planar, q.to(tl.int16), mask=inside)


@triton.jit
def inverse_kernel(
    codes_ptr, x_ptr, out_ptr, damage_ptr, group_tile_ptr, group_first_ptr, start_ptr, blocks_ptr, tensor_ptr,
    magic_ptr, mantissa_ptr, scale_ptr, high_ptr, low_ptr, weight,
    AREA: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr, B: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """Turn a group of blocks back into values: set them, add them, or keep what they leave of `x`.

    Nothing is written if the stream is damaged, nor to blocks without codes when adding.
    """
    pid = tl.program_id(0)
    tile = tl.load(group_tile_ptr + pid)
    blocks = tl.load(blocks_ptr + tile)
    tensor = tl.load(tensor_ptr + tile)
    start = tl.load(start_ptr + tile)
    usable = tl.where(tl.load(damage_ptr) == 0, blocks, 0)
    b = tl.load(group_first_ptr + pid) + tl.arange(0, B)
    place = tl.program_id(1) * TILE + tl.arange(0, TILE)
    y = tl.zeros([B, TILE], tl.int32)
    largest = tl.zeros([B], tl.int32)
    for first in range(0, D, TILE):
        f = first + tl.arange(0, TILE)
        inside = (b < usable)[:, None] & (f < AREA)[None, :]
        q = tl.load(codes_ptr + start + f[None, :] * blocks + b[:, None], mask=inside, other=0).to(tl.int32)
        largest = tl.maximum(largest, tl.max(tl.abs(q), 1))
        high = tl.load(high_ptr + f[:, None] * D + place[None, :])
        low = tl.load(low_ptr + f[:, None] * D + place[None, :])
        upper = (q + 128) >> 8
        lower = (q - (upper << 8)).to(tl.float16)
        y += tl.dot(lower, high).to(tl.int32) << 9
        y += tl.dot(lower, low).to(tl.int32)
        if tl.max(tl.max(tl.abs(upper), 1), 0) > 0:  # codes beyond a byte are rare
            y += tl.dot(upper.to(tl.float16), high).to(tl.int32) << 17
            y += tl.dot(upper.to(tl.float16), low).to(tl.int32) << 8
    value = _to_values(y, tl.load(mantissa_ptr + tensor), tl.load(scale_ptr + tensor))
    at = start + b[:, None] * AREA + place[None, :]
    inside = (b < usable)[:, None] & (place < AREA)[None, :]
    if MODE == ADD:
        inside = inside & (largest > 0)[:, None]
        before = tl.load(out_ptr + at, mask=inside, other=0.0)
        tl.store(out_ptr + at, before + weight * value, mask=inside)
    elif MODE == KEEP:
        magic = tl.load(magic_ptr + tensor)
        x = (tl.load(x_ptr + at, mask=inside, other=0.0) + magic) - magic
        tl.store(out_ptr + at, x - value, mask=inside)
    else:
        tl.store(out_ptr + at, value, mask=inside)


@triton.jit
def quantise_kernel(
    x_ptr, codes_ptr, kept_ptr, start_ptr, size_ptr, tensor_ptr, inverse_ptr, threshold_ptr, magic_ptr,
    mantissa_ptr, scale_ptr, KEEPING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Quantise values without a transform: tensors that have none, and rests."""
    pid = tl.program_id(0)
    k = tl.arange(0, BLOCK)
    inside = k < tl.load(size_ptr + pid)
    at = tl.load(start_ptr + pid) + k
    tensor = tl.load(tensor_ptr + pid)
    magic = tl.load(magic_ptr + tensor)
    x = (tl.load(x_ptr + at, mask=inside, other=0.0) + magic) - magic
    q = to_codes(x, tl.load(threshold_ptr + tensor), tl.load(inverse_ptr + tensor))
    tl.store(codes_ptr + at, q.to(tl.int16), mask=inside)
    if KEEPING:
        sent = _to_values(q << IDENTITY_SHIFT, tl.load(mantissa_ptr + tensor), tl.load(scale_ptr + tensor))
        tl.store(kept_ptr + at, x - sent, mask=inside)


@triton.jit
def identity_kernel(
    codes_ptr, out_ptr, damage_ptr, start_ptr, size_ptr, tensor_ptr, mantissa_ptr, scale_ptr, weight,
    MODE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The inverse for values without a transform."""
    pid = tl.program_id(0)
    k = tl.arange(0, BLOCK)
    inside = k < tl.where(tl.load(damage_ptr) == 0, tl.load(size_ptr + pid), 0)
    at = tl.load(start_ptr + pid) + k
    tensor = tl.load(tensor_ptr + pid)
    q = tl.load(codes_ptr + at, mask=inside, other=0).to(tl.int32)
    value = _to_values(q << IDENTITY_SHIFT, tl.load(mantissa_ptr + tensor), tl.load(scale_ptr + tensor))
    if MODE == ADD:
        inside = inside & (q != 0)
        before = tl.load(out_ptr + at, mask=inside, other=0.0)
        tl.store(out_ptr + at, before + weight * value, mask=inside)
    else:
        tl.store(out_ptr + at, value, mask=inside)


@triton.jit
def gather_kernel(x_ptr, out_ptr, start_ptr, out_start_ptr, size_ptr, BLOCK: tl.constexpr):
    """Copy one segment."""
    pid = tl.program_id(0)
    k = tl.arange(0, BLOCK)
    inside = k < tl.load(size_ptr + pid)
    x = tl.load(x_ptr + tl.load(start_ptr + pid) + k, mask=inside)
    tl.store(out_ptr + tl.load(out_start_ptr + pid) + k, x, mask=inside)


@triton.jit
def add_kernel(x_ptr, out_ptr, start_ptr, out_start_ptr, size_ptr, damage_ptr, weight, BLOCK: tl.constexpr):
    """Add one segment times `weight`."""
    pid = tl.program_id(0)
    k = tl.arange(0, BLOCK)
    inside = k < tl.where(tl.load(damage_ptr) == 0, tl.load(size_ptr + pid), 0)
    x = tl.load(x_ptr + tl.load(start_ptr + pid) + k, mask=inside, other=0.0)
    at = tl.load(out_start_ptr + pid) + k
    before = tl.load(out_ptr + at, mask=inside, other=0.0)
    tl.store(out_ptr + at, before + weight * x, mask=inside)


@triton.jit
def floats_kernel(
    x_ptr, out_ptr, kept_ptr, start_ptr, out_start_ptr, size_ptr, scale_ptr,
    KEEPING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write one segment as float16 over its scale, or as float32 where the scale is 0; keep the rest."""
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
    if KEEPING:
        tl.store(kept_ptr + at, x - sent, mask=inside)
