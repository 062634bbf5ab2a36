"""The Triton backend: buckets that lie on a GPU, packed there.

`GpuDct` is to CUDA tensors what `Dct` is to vectors: the same options, the same streams.
Only packed bytes and a few numbers a tensor cross to the host and back; a payload is left
in pinned memory. Decoding gives the CPU's bits; encoding may place a coefficient that lies
on the edge between two codes on the other side of it.

With TRITON_INTERPRET=1 it runs on CPU tensors, slowly, for tests.
"""

import os
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoestring.codec.base import Buffer, Layout
from shoestring.codec.dct import format as stream
from shoestring.codec.dct.codec import Dct, refuse_bad_tensor
from shoestring.codec.dct.gpu import entropy, transform
from shoestring.codec.dct.gpu.places import LANES, PIECE_LENGTH, Places, cut, find_places, tile_of, to_device
from shoestring.codec.dct.gpu.sample import curves, relative_steps, sample
from shoestring.codec.dct.gpu.tables import (
    cost_table,
    forward_matrix,
    inverse_digits,
    reciprocal_table,
    slot_table,
    span_table,
)
from shoestring.codec.dct.plan import Floats, Samples, Wanted, list_wanted, plan
from shoestring.codec.dct.steps import Steps, of_headers
from shoestring.errors import CodecError, StreamError

# A quarter of the CPU's: more chunks walk in step, each for a quarter as long.
CHUNK_BITS = 2048
SEGMENT = 1 << 14
# More room for words than the sample foresaw; where that is short, all there can be.
SPARE, SPARE_BITS, MOST_BITS = 4.0, 0.5, 64.0
SET, ADD, KEEP = transform.SET.value, transform.ADD.value, transform.KEEP.value

_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


class GpuDct:
    """The codec `dct` for float32 tensors on a GPU. Holds options and small tables: safe to share."""

    name = "dct"

    def __init__(self, **options: Any) -> None:
        self._codec = Dct(**options)
        self.options = self._codec.options

    @property
    def spec(self) -> str:
        return self._codec.spec

    def encode(self, values: Tensor, layout: Layout, kept: Tensor | None = None) -> Tensor:
        """Turn a bucket into bytes in pinned memory; `kept` receives what they leave out."""
        _check(values, layout, "values")
        if kept is not None:
            _check(kept, layout, "kept")
        headers, bits, largest = self._plan(values, layout)
        room = np.minimum(SPARE * bits + SPARE_BITS, MOST_BITS)
        while True:
            payload, longest, fits = _encode(values, layout, headers, room, largest, kept)
            if not fits:
                room = np.full_like(bits, MOST_BITS)
            elif longest > stream.MAX_WORDS:
                headers["chunk_log2"] = np.minimum(headers["chunk_log2"], stream.SAFE_CHUNK_LOG2)
            else:
                return payload

    def _plan(
        self, values: Tensor, layout: Layout
    ) -> tuple[NDArray[np.void], NDArray[np.float64], NDArray[np.float64]]:
        """Return headers, expected bits a value and largest magnitudes; waits for the GPU once."""
        tensors = range(len(layout.sizes))
        wanted = list_wanted(
            layout, self.options, [k for k in tensors if layout.sizes[k] >= self.options.small]
        )
        relative = relative_steps(self.options)
        results, rms = scan(values, layout)
        measured = sample(values, layout, wanted, rms, relative)
        energy, tops = results.cpu().numpy()
        bad = np.flatnonzero(tops >= 0x7F800000)
        refuse_bad_tensor(int(bad[0]) if bad.size else -1, layout)
        largest = tops.astype(np.int32).view(np.float32).astype(np.float64)

        def costs(chosen: Wanted, _: Floats) -> Samples:
            assert measured is not None
            all_of_them = curves(measured, layout, wanted, relative)
            return (
                all_of_them.only([wanted.index(pair) for pair in chosen])
                if len(chosen) < len(wanted)
                else all_of_them
            )

        headers, bits = plan(layout, self.options, energy, largest, costs, CHUNK_BITS)
        return headers, bits, largest

    def decode(
        self, payload: Buffer | Tensor, layout: Layout, out: Tensor, weight: float | None = None
    ) -> None:
        """Write the decoded values into `out`, or add them times `weight`; see `Codec.decode`."""
        _check(out, layout, "out")
        if not isinstance(payload, Tensor):
            payload = torch.from_numpy(np.frombuffer(payload, np.uint8).copy())
        parsed = stream.parse(payload.numpy(), layout)
        raw = stream.raw_values(parsed, layout)
        device = out.device
        places = find_places(layout, parsed.headers, device)
        steps = _Steps(of_headers(parsed.headers), device)
        mode = SET if weight is None else ADD
        factor = 1.0 if weight is None else float(weight)
        if weight is None:
            out.zero_()
        damage = torch.zeros(1, dtype=torch.int32, device=device)
        codes = torch.zeros(layout.total, dtype=torch.int16, device=device)
        if places.chunks:
            _decode_chunks(payload.to(device, non_blocking=True), parsed.geometry, places, codes, damage)
        _inverse(codes, out, out, damage, places, steps, factor, mode)
        if places.plain.count:
            plain = places.plain
            transform.identity_kernel[(plain.count,)](
                codes, out, damage, plain.start, plain.size, plain.tensor, steps.mantissa, steps.scale,
                factor, MODE=mode, BLOCK=plain.length, enable_fp_fusion=False,
            )  # fmt: skip
        if raw:
            floats = places.floats
            transform.add_kernel[(floats.count,)](
                to_device(np.concatenate([tensor for _, tensor in raw]), device), out, floats.value_start,
                floats.start, floats.size, damage, factor, BLOCK=floats.length, enable_fp_fusion=False,
            )  # fmt: skip
        damaged = int(damage.item())
        if damaged:
            raise StreamError(f"{damaged} chunks are damaged", hint=stream.HINT)


class _Steps:
    """The steps of all tensors, on the device in one copy."""

    def __init__(self, steps: Steps, device: torch.device) -> None:
        rows = np.stack([array.view(np.float32) for array in steps.arrays])
        moved = to_device(rows, device)
        self.inverse, self.threshold, self.magic, _, self.scale = moved
        self.mantissa = moved[3].view(torch.int32)


def _encode(
    values: Tensor,
    layout: Layout,
    headers: NDArray[np.void],
    bits: NDArray[np.float64],
    largest: NDArray[np.float64],
    kept: Tensor | None,
) -> tuple[Tensor, int, bool]:
    """Return the payload, the words of its longest chunk, and whether the words had room."""
    device = values.device
    geometry = stream.lay_out(layout, headers)
    places = find_places(layout, headers, device)
    steps = _Steps(of_headers(headers, largest), device)
    keep = kept is not None
    target = kept if kept is not None else values
    if keep:
        target.copy_(values)  # tensors of which nothing is sent are kept whole
    codes = _quantise(values, places, steps, target, keep)
    if keep:
        intact = torch.zeros(1, dtype=torch.int32, device=device)
        _inverse(codes, values, target, intact, places, steps, 1.0, KEEP)

    top, floor = places.word_room(bits)
    room = int(top[-1]) if places.chunks else 0
    payload = _pinned(geometry.words_at + 2 * room + 2 * stream.STATE_WORDS * places.chunks)
    raw_at = geometry.chunks_at + stream.CHUNK.itemsize * geometry.chunks
    if places.floats.count:
        floats = places.floats
        raw = torch.empty((geometry.words_at - raw_at) // 2, dtype=torch.int16, device=device)
        transform.floats_kernel[(floats.count,)](
            values, raw, target, floats.start, floats.word_start, floats.size,
            to_device(floats.scales(headers), device), KEEPING=keep, BLOCK=floats.length,
        )  # fmt: skip
        payload[raw_at : geometry.words_at].view(torch.int16).copy_(raw, non_blocking=True)
    summary = _pinned(24).view(torch.int64)
    summary.zero_()
    if places.chunks:
        words = torch.empty(room, dtype=torch.int16, device=device)
        bounds = to_device(np.stack([floor, top]), device)
        _encode_chunks(codes, places, words, bounds, geometry, payload, summary)
    start = stream.join(headers, np.empty(0, np.uint32), [], [])
    payload[: start.size] = torch.from_numpy(start)
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    written, longest, short = summary.tolist()
    return payload[: geometry.words_at + 2 * written], longest, short == 0


def _quantise(values: Tensor, places: Places, steps: _Steps, kept: Tensor, keep: bool) -> Tensor:
    device = values.device
    codes = torch.empty(values.numel(), dtype=torch.int16, device=device)
    for n, group in places.groups.items():
        tile = tile_of(n)
        transform.forward_kernel[(group.count, tile.columns)](
            values, codes, group.tile, group.first, places.start, places.blocks, places.start, places.blocks,
            places.tensor, steps.inverse, steps.threshold, steps.magic, forward_matrix(n, device),
            AREA=n * n, D=tile.depth, TILE=tile.side, B=group.blocks, COEFFICIENTS=False,
        )  # fmt: skip
    if places.plain.count:
        plain = places.plain
        transform.quantise_kernel[(plain.count,)](
            values, codes, kept, plain.start, plain.size, plain.tensor, steps.inverse, steps.threshold,
            steps.magic, steps.mantissa, steps.scale, KEEPING=keep, BLOCK=plain.length,
        )  # fmt: skip
    return codes


def _inverse(
    codes: Tensor,
    values: Tensor,
    out: Tensor,
    damage: Tensor,
    places: Places,
    steps: _Steps,
    weight: float,
    mode: int,
) -> None:
    for n, group in places.groups.items():
        tile = tile_of(n)
        high, low = inverse_digits(n, codes.device)
        transform.inverse_kernel[(group.count, tile.columns)](
            codes, values, out, damage, group.tile, group.first, places.start, places.blocks, places.tensor,
            steps.magic, steps.mantissa, steps.scale, high, low, weight,
            AREA=n * n, D=tile.depth, TILE=tile.side, B=group.blocks, MODE=mode, enable_fp_fusion=False,
        )  # fmt: skip


def _encode_chunks(
    codes: Tensor,
    places: Places,
    words: Tensor,
    bounds: Tensor,
    geometry: stream.Geometry,
    payload: Tensor,
    summary: Tensor,
) -> None:
    """List, code and pack all chunks; the last words they need stay on the device."""
    device, chunks, pieces = codes.device, places.chunks, places.pieces
    floor, top = bounds
    piece_counts = torch.empty(pieces.count, dtype=torch.int32, device=device)
    entropy.count_kernel[(pieces.count,)](codes, pieces.start, pieces.size, piece_counts, BLOCK=PIECE_LENGTH)
    listed = torch.zeros(pieces.count + 1, dtype=torch.int64, device=device)
    torch.cumsum(piece_counts, 0, out=listed[1:])
    positions = torch.empty(codes.numel(), dtype=torch.int32, device=device)
    levels = torch.empty(codes.numel(), dtype=torch.int16, device=device)
    entropy.list_kernel[(pieces.count,)](
        codes, pieces.start, pieces.size, pieces.offset, piece_counts, listed[1:], positions, levels,
        BLOCK=PIECE_LENGTH,
    )  # fmt: skip
    lists = listed[pieces.first]  # where each chunk's list begins, and the end of the last
    gap_spans, level_spans, rests = torch.empty((3, places.lane_room), dtype=torch.int32, device=device)
    tail, tables, at, lengths = torch.empty((4, chunks), dtype=torch.int32, device=device)
    entropy.table_kernel[(chunks,)](
        positions, levels, lists, places.order, places.chunk_size, places.lane_base, cost_table(device),
        span_table(device), tail, tables, gap_spans, level_spans, rests, LANES=LANES,
        BLOCK=512,
    )  # fmt: skip
    states = torch.empty(2 * chunks, dtype=torch.int32, device=device)
    limits = torch.zeros(2, dtype=torch.int32, device=device)
    entropy.encode_kernel[(-(-chunks // LANES),)](
        gap_spans, level_spans, rests, places.lane_base, places.order, lists, tail, tables,
        span_table(device), reciprocal_table(device), words, floor, top, at, lengths, states, limits, chunks,
        LANES=LANES, num_warps=1,
    )  # fmt: skip
    entropy.pack_kernel[(chunks,)](
        words, at, lengths, torch.cumsum(lengths, 0), states, tables, limits,
        payload[geometry.chunks_at :][: 4 * chunks].view(torch.int32),
        payload[geometry.words_at :].view(torch.int16), summary, chunks, BLOCK=256, num_warps=2,
    )  # fmt: skip


def _decode_chunks(
    payload: Tensor, geometry: stream.Geometry, places: Places, codes: Tensor, damage: Tensor
) -> None:
    words = payload[geometry.words_at :].view(torch.int16)
    heads = payload[geometry.chunks_at :][: 4 * geometry.chunks].view(torch.int32)
    lengths = heads & stream.MAX_WORDS
    first = torch.cumsum(lengths, 0) - lengths
    entropy.decode_kernel[(-(-places.chunks // LANES),)](
        words, heads, first, places.order, places.chunk_start, places.chunk_size, slot_table(codes.device),
        span_table(codes.device),
        codes, damage, places.chunks, LANES=LANES, num_warps=1,
    )  # fmt: skip


def scan(values: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """Start to measure each tensor; return [energy, bits of the largest magnitude] and the rms."""
    device, tensors = values.device, len(layout.sizes)
    begins, sizes, start, size = _segments(layout, device)
    segments = torch.empty((2, max(start.numel(), 1)), dtype=torch.float64, device=device)
    results = torch.zeros((2, tensors), dtype=torch.float64, device=device)
    rms = torch.zeros(tensors, dtype=torch.float32, device=device)
    if layout.total:
        transform.scan_kernel[(start.numel(),)](values, start, size, segments, segments[1], BLOCK=1024)
        transform.sum_kernel[(tensors,)](
            segments, segments[1], begins, sizes, results, rms, tensors, BLOCK=256
        )
    return results, rms


@cache
def _segments(layout: Layout, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return where each tensor's segments begin among all, its size, and the segments' starts and sizes."""
    sizes = np.array(layout.sizes, np.int64)
    owner, first, size = cut(sizes, SEGMENT)
    begins = np.searchsorted(owner, np.arange(sizes.size + 1))
    starts = np.array(layout.offsets, np.int64)[owner] + first
    return (
        to_device(begins, device),
        to_device(sizes, device),
        to_device(starts, device),
        to_device(size.astype(np.int32), device),
    )


def _pinned(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=not _INTERPRETED)


def _check(tensor: Tensor, layout: Layout, name: str) -> None:
    if tensor.dtype != torch.float32 or tensor.dim() != 1 or not tensor.is_contiguous():
        raise CodecError(
            f"`{name}` is {tensor.dtype} with shape {tuple(tensor.shape)}, "
            "expected one contiguous float32 vector",
            hint="flatten it and convert it to float32 first",
        )
    if tensor.device.type != "cuda" and not _INTERPRETED:
        raise CodecError(f"`{name}` is on {tensor.device}, not on a GPU", hint="use `make_codec` on a CPU")
    if tensor.numel() != layout.total:
        raise CodecError(
            f"`{name}` has {tensor.numel()} values, but the layout has {layout.total}",
            hint="pass the layout the bucket was built with",
        )
