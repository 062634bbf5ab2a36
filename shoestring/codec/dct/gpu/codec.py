"""The Triton backend: buckets that lie on a GPU, packed there.

`GpuDct` is to CUDA tensors what `Dct` is to vectors: the same options, the same streams.
Only packed bytes and a few numbers a tensor cross to the host and back; a payload is left
in pinned memory. Decoding gives the CPU's bits; encoding may place a coefficient that lies
on the edge between two codes on the other side of it.

The GPU is never asked anything while it has work: encoding waits for it when it has measured
the bucket, and when the words have arrived; decoding once, at the end. While it works, the host
prepares what it will be given next.

With TRITON_INTERPRET=1 it runs on CPU tensors, slowly, for tests.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoestring.codec.base import Buffer, Layout
from shoestring.codec.dct import format as fmt
from shoestring.codec.dct import stream
from shoestring.codec.dct.choice import Chunking, Floats, Question, ask
from shoestring.codec.dct.codec import Dct
from shoestring.codec.dct.coding import refuse_bad_tensor
from shoestring.codec.dct.gpu import entropy, lists, transform
from shoestring.codec.dct.gpu.launch import INTERPRETED
from shoestring.codec.dct.gpu.places import Places, find_places, pinned, tile_of, to_device
from shoestring.codec.dct.gpu.sample import Measured, find_samples, step_ranges
from shoestring.codec.dct.gpu.tables import (
    cost_table,
    forward_matrix,
    inverse_basis,
    reciprocal_table,
    slot_table,
    span_table,
)
from shoestring.codec.dct.steps import STEP_COLUMNS, find_steps
from shoestring.errors import CodecError, StreamError

# A quarter of the CPU's chunks: more walk in step, each for a quarter as long. An item of a chunk's
# list has 16 bits for its place.
CHUNKING = Chunking(bits=2048, most_log2=16)
# Words that a chunk has room for, a value: hardly ever too few; then, as many as there can be.
ROOM, MOST_ROOM = 1, 4
# Kernels read aligned runs of codes, and a few bytes behind a stream.
FOUR, SPARE_BYTES = lists.FOUR.value, 16
# Codes by four and items that the program of a chunk takes at once; histograms, lengths that one does.
FOURS, LIST, HISTOGRAMS, LENGTHS = 512, 128, 64, 4096
HARD_PROGRAMS = 1024
# How much longer than expected a payload may be to arrive at once: a part of it, and some bytes.
MARGIN, MARGIN_BYTES = 1 / 8, 1 << 12
SET, ADD, SUBTRACT = transform.SET.value, transform.ADD.value, transform.SUBTRACT.value


class Steps:
    """The steps of all tensors, on the device; allocated before the steps are known."""

    def __init__(self, tensors: int, device: torch.device) -> None:
        self._here = pinned(4 * STEP_COLUMNS * tensors).view(torch.float32).view(tensors, STEP_COLUMNS)
        self._numbers = self._here.numpy()
        self.there = torch.empty_like(self._here, device=device)

    def find(self, headers: NDArray[np.void], largest: Floats) -> None:
        find_steps(headers, largest, self._numbers)
        self.there.copy_(self._here, non_blocking=True)

    def take(self, steps: NDArray[np.float32]) -> None:
        self._numbers[:] = steps
        self.there.copy_(self._here, non_blocking=True)


@dataclass(frozen=True)
class Choice:
    """What was chosen for a bucket, and memory for its codes."""

    headers: NDArray[np.void]
    steps: Tensor
    expected_bytes: int
    codes: Tensor


class GpuDct:
    """The codec `dct` for float32 tensors on a GPU. Holds options and small tables: safe to share."""

    name = "dct"

    def __init__(self, **options: Any) -> None:
        self._codec = Dct(**options)
        self.options = self._codec.options
        self._ranges = step_ranges(self.options)

    @property
    def spec(self) -> str:
        return self._codec.spec

    def encode(self, values: Tensor, layout: Layout, left_over: Tensor | None = None) -> Tensor:
        """Turn a bucket into bytes in pinned memory; see `Codec.encode`."""
        _check(values, layout, "values")
        if left_over is not None:
            _check(left_over, layout, "left_over")
        choice = self._choose(values, layout)
        room = ROOM
        while True:
            payload, longest, fits = _encode(values, layout, choice, room, left_over)
            if not fits:
                room = MOST_ROOM
            elif longest > fmt.MAX_WORDS:
                chunk_log2 = choice.headers["chunk_log2"]
                np.minimum(chunk_log2, fmt.SAFE_CHUNK_LOG2, out=chunk_log2)
            else:
                return payload

    def _choose(self, values: Tensor, layout: Layout) -> Choice:
        """Choose headers and steps; waits for the GPU, hardly ever more than once."""
        device = values.device
        question = ask(layout, self.options)
        for relative in self._ranges:
            measured = find_samples(layout, question, relative, device).measure(values)
            # Made while the GPU measures.
            steps = Steps(len(layout.sizes), device)
            codes = torch.empty((layout.total // FOUR + 1) * FOUR, dtype=torch.int16, device=device)
            _wait(device)
            step, is_met = self._find_step(question, measured)
            headers, bits = question.answer(
                measured.energy, measured.largest, step, measured.relative, measured.costs, CHUNKING
            )
            if math.isinf(bits):
                refuse_bad_tensor(int(np.argmin(np.isfinite(measured.largest))), layout)
            if is_met:
                break
        steps.find(headers, measured.largest)
        expected = int(bits / 8 * (1 + MARGIN)) + MARGIN_BYTES
        return Choice(headers, steps.there, expected, codes)

    def _find_step(self, question: Question, measured: Measured) -> tuple[float, bool]:
        """Return the step over rms, and whether it lies in the range that was measured."""
        if self.options.bits is None:
            return self.options.step, True
        budget, values = question.budget(measured.largest, CHUNKING)
        step, is_met = question.step_for_budget(
            measured.energy, measured.largest, budget, measured.relative, measured.costs
        )
        return step, is_met or not values

    def decode(
        self, payload: Buffer | Tensor, layout: Layout, out: Tensor, weight: float | None = None
    ) -> None:
        """Write the decoded values into `out`, or add them times `weight`; see `Codec.decode`."""
        _check(out, layout, "out")
        if not isinstance(payload, Tensor):
            payload = torch.from_numpy(np.frombuffer(payload, np.uint8).copy())
        device, size = out.device, payload.numel()
        # Both are under way while the host looks at the headers.
        own = torch.empty((size + SPARE_BYTES) // 4 * 4, dtype=torch.uint8, device=device)
        own[:size].copy_(payload, non_blocking=True)
        codes = torch.zeros(layout.total, dtype=torch.int16, device=device)
        parsed = stream.parse(payload.numpy(), layout)
        places = find_places(layout, parsed.headers, device)
        damage = torch.zeros(1, dtype=torch.int32, device=device)
        if places.chunks:
            _decode_chunks(own, parsed, places, codes, damage)
        steps = Steps(len(parsed.headers), device)
        steps.take(parsed.steps)
        mode = SET if weight is None else ADD
        factor = 1.0 if weight is None else float(weight)
        if weight is None:
            for uncoded in places.uncoded:
                out[uncoded].zero_()
        _inverse(codes, out, out, damage, places, steps.there, factor, mode)
        if places.plain.count:
            plain = places.plain
            transform.identity_kernel((plain.count,),
                codes, out, damage, plain.start, plain.size, plain.tensor, steps.there, factor,
                ALIGN=plain.align, MODE=mode, BLOCK=plain.length, enable_fp_fusion=False,
            )  # fmt: skip
        if places.floats.count:
            segments = places.floats
            transform.add_kernel((segments.count,),
                to_device(parsed.floats, device), out, segments.value_start, segments.start, segments.size,
                damage, factor, BLOCK=segments.length, enable_fp_fusion=False,
            )  # fmt: skip
        damaged = int(damage.item())
        if damaged:
            raise StreamError(f"{damaged} chunks are damaged", hint=fmt.HINT)


def _encode(
    values: Tensor, layout: Layout, choice: Choice, room: int, left_over: Tensor | None
) -> tuple[Tensor, int, bool]:
    """Return the payload, the words of its longest chunk, and whether the words had room."""
    device, headers, codes = values.device, choice.headers, choice.codes
    places = find_places(layout, headers, device)
    _quantise(values, places, choice.steps, codes, left_over)
    if left_over is not None:
        for uncoded in places.uncoded:
            left_over[uncoded].copy_(values[uncoded])
        intact = torch.zeros(1, dtype=torch.int32, device=device)
        _inverse(codes, values, left_over, intact, places, choice.steps, 1.0, SUBTRACT)

    geometry = places.geometry
    most_words = room * layout.total + entropy.SLACK.value * places.chunks
    own = torch.empty(geometry.words_at + 2 * most_words, dtype=torch.uint8, device=device)
    if places.floats.count:
        segments = places.floats
        transform.floats_kernel((segments.count,),
            values, own[geometry.floats_at : geometry.words_at].view(torch.int16),
            values if left_over is None else left_over, segments.start, segments.word_start, segments.size,
            to_device(segments.scales(headers), device),
            WANTS_LEFT_OVER=left_over is not None, BLOCK=segments.length,
        )  # fmt: skip
    summary = pinned(24).view(torch.int64)
    if places.chunks:
        _encode_chunks(codes, places, room, geometry, own, summary)
    else:
        summary.zero_()
    # Copied before its size is known: the GPU would be idle for longer than the bytes behind it take.
    start = stream.new_payload(headers, geometry, geometry.chunks_at)
    payload = _fetch(own, start, min(max(choice.expected_bytes, geometry.words_at), own.numel()))
    _wait(device)
    written, longest, short = summary.tolist()
    size = geometry.words_at + 2 * written
    if size > payload.numel() and not short:
        payload = _fetch(own, start, size)
        _wait(device)
    return payload[:size], longest, not short


def _fetch(own: Tensor, start: NDArray[np.uint8], size: int) -> Tensor:
    """Start to copy a payload to pinned memory, but for its start, which is known here."""
    payload = pinned(size)
    payload[start.size :].copy_(own[start.size : size], non_blocking=True)
    payload.numpy()[: start.size] = start
    return payload


def _quantise(values: Tensor, places: Places, steps: Tensor, codes: Tensor, left_over: Tensor | None) -> None:
    for n, group in places.groups.items():
        tile = tile_of(n)
        transform.forward_kernel((group.count, tile.columns),
            values, codes, group.rows, steps, forward_matrix(n, values.device), AREA=n * n, D=tile.depth,
            TILE=tile.side, B=group.blocks, ALIGN=group.align, PLANE=group.plane, COEFFICIENTS=False,
        )  # fmt: skip
    if places.plain.count:
        plain = places.plain
        transform.quantise_kernel((plain.count,),
            values, codes, values if left_over is None else left_over, plain.start, plain.size, plain.tensor,
            steps, ALIGN=plain.align, WANTS_LEFT_OVER=left_over is not None, BLOCK=plain.length,
        )  # fmt: skip


def _inverse(
    codes: Tensor,
    values: Tensor,
    out: Tensor,
    damage: Tensor,
    places: Places,
    steps: Tensor,
    weight: float,
    mode: int,
) -> None:
    for n, group in places.groups.items():
        tile = tile_of(n)
        basis, small = inverse_basis(n, codes.device)
        easy_first = tile.columns == 1  # larger blocks are all treated as hard
        hard = torch.full((group.count + 1,), not easy_first, dtype=torch.int8, device=codes.device)
        arguments = (codes, values, out, damage, hard, group.rows, steps, basis, weight)
        if easy_first:
            transform.inverse_kernel((group.count,),
                *arguments, AREA=n * n, D=tile.depth, B=group.blocks, SMALL=small,
                ALIGN=group.align, PLANE=group.plane, MODE=mode, enable_fp_fusion=False,
            )  # fmt: skip
        transform.wrapping_kernel((min(group.count, HARD_PROGRAMS), tile.columns),
            *arguments, group.count, AREA=n * n, D=tile.depth, TILE=tile.side, B=group.blocks,
            ALIGN=group.align, PLANE=group.plane, MODE=mode, enable_fp_fusion=False,
        )  # fmt: skip


def _encode_chunks(
    codes: Tensor, places: Places, room: int, geometry: fmt.Geometry, payload: Tensor, summary: Tensor
) -> None:
    """List, code and pack all chunks."""
    device, chunks, values = codes.device, places.chunks, codes.numel()
    items = torch.empty(values, dtype=torch.int32, device=device)
    marks = torch.empty(values // FOUR + chunks, dtype=torch.int16, device=device)
    notes = torch.empty((lists.NOTES.value, chunks), dtype=torch.int32, device=device)
    histograms = torch.empty(2 * lists.BINS.value * chunks, dtype=torch.int32, device=device)
    lists.list_kernel((chunks,),
        codes.view(torch.int64), places.order, places.chunk_start, places.chunk_size, marks, items, notes,
        histograms, chunks, BLOCK=FOURS, LIST=LIST, num_warps=1,
    )  # fmt: skip
    lists.table_kernel(
        (-(-2 * chunks // HISTOGRAMS),), histograms, cost_table(device), notes, chunks, ROWS=HISTOGRAMS
    )
    words = torch.empty(room * values + entropy.SLACK.value * chunks, dtype=torch.int16, device=device)
    entropy.encode_kernel((-(-chunks // places.lanes),),
        items, places.order, places.chunk_start, places.chunk_size, notes, span_table(device),
        reciprocal_table(device), words, chunks, ROOM=room, LANES=places.lanes, num_warps=1,
    )  # fmt: skip
    ends = torch.empty(chunks, dtype=torch.int64, device=device)
    entropy.place_kernel((1,), notes, ends, summary, chunks, BLOCK=LENGTHS, num_warps=8)
    heads = payload[geometry.chunks_at :][: 4 * chunks].view(torch.int32)
    entropy.pack_kernel((chunks,),
        words, places.chunk_start, places.chunk_size, notes, ends, heads,
        payload[geometry.words_at :].view(torch.int16), chunks, ROOM=room, BLOCK=256, num_warps=1,
    )  # fmt: skip


def _decode_chunks(
    payload: Tensor, parsed: stream.Stream, places: Places, codes: Tensor, damage: Tensor
) -> None:
    device, geometry = codes.device, parsed.geometry
    starts = pinned(8 * places.chunks).view(torch.int64)
    np.add(parsed.word_starts[:-1], geometry.words_at // 2, out=starts.numpy())
    entropy.decode_kernel((-(-places.chunks // places.lanes),),
        payload.view(torch.int32), payload[geometry.chunks_at :][: 4 * geometry.chunks].view(torch.int32),
        starts.to(device, non_blocking=True), places.order, places.chunk_start, places.chunk_size,
        slot_table(device), span_table(device), codes, damage, places.chunks,
        LANES=places.lanes, num_warps=1,
    )  # fmt: skip


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _check(tensor: Tensor, layout: Layout, name: str) -> None:
    if tensor.dtype != torch.float32 or tensor.dim() != 1 or not tensor.is_contiguous():
        raise CodecError(
            f"`{name}` is {tensor.dtype} with shape {tuple(tensor.shape)}, "
            "expected one contiguous float32 vector",
            hint="flatten it and convert it to float32 first",
        )
    if tensor.device.type != "cuda" and not INTERPRETED:
        raise CodecError(f"`{name}` is on {tensor.device}, not on a GPU", hint="use `make_codec` on a CPU")
    if tensor.numel() != layout.total:
        raise CodecError(
            f"`{name}` has {tensor.numel()} values, but the layout has {layout.total}",
            hint="pass the layout the bucket was built with",
        )
