"""`python -m benchmarks.gpu.codec`: check and time the GPU codec.

First the equality: streams of the CPU and of the GPU, whole and damaged, decode to the same
bits or the same refusal. Then 256 MiB of float32 on the device: encode to packed bytes in
pinned memory and decode-and-add, in wall time with everything the host does, beside a
device-to-device copy of the same 256 MiB in the same run.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import numpy as np
import torch
import typer

from benchmarks.command import Command, say
from shoestring.cli.bench.options import AsJson, Output, check_output, deliver
from shoestring.codec.base import Layout
from shoestring.codec.dct import Dct, stream
from shoestring.codec.dct import format as fmt
from shoestring.codec.dct.gpu import GpuDct
from shoestring.codec.dct.reference import encode_chunk
from shoestring.errors import StreamError

LAYOUTS = {
    "mixed": [(16, 8, 3, 3), (10,), (70, 33), (300,), (5, 5, 5, 5), (3000,), (6, 2, 7, 7), (1,), (0,)],
    "long": [(700, 401), (300_000,)],
}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"small": 16, "step": 0.3},
    {"block": 4, "bits": 1.0},
    {"block": 16, "transform": "always", "step": 1.0},
    {"block": 32, "transform": "always", "step": 4.0, "small": 0},
    {"transform": "never", "small_as": "float32", "bits": 0.1},
]
CODES = (1, 3, 127, 128, 32767)


def gradient(layout: Layout, seed: int) -> np.ndarray:
    """Laplace values whose scale varies from row to row, as that of gradients does."""
    rng = np.random.default_rng(seed)
    values = rng.laplace(size=layout.total).astype(np.float32)
    rows = np.exp(rng.standard_normal(layout.total // 512 + 1) / 2).astype(np.float32)
    return values * np.repeat(rows, 512)[: layout.total]


def check() -> dict[str, int]:
    """Compare with the CPU; raise where a bit differs."""
    counts = {"streams": 0, "same_bytes": 0, "refused": 0}
    rng = np.random.default_rng(0)
    for shapes in LAYOUTS.values():
        layout = Layout.of(shapes)
        for options in OPTIONS:
            x = gradient(layout, 7)
            cpu, gpu = Dct(**options), GpuDct(**options)
            device = torch.from_numpy(x).cuda()
            left_over = torch.full_like(device, torch.nan)
            ours = gpu.encode(device, layout, left_over)
            theirs = cpu.encode(x, layout)
            counts["same_bytes"] += ours.numel() == theirs.size and bool((ours.numpy() == theirs).all())
            sent = compare(cpu, gpu, ours.numpy().copy(), layout, x)
            left = left_over.cpu().numpy()
            assert sent is not None
            assert (sent.astype(np.float64) + left == sent + left).all()
            assert np.abs(sent + left - x).max() <= np.abs(x).max() * 2.0**-16
            compare(cpu, gpu, theirs, layout, x)
            for _ in range(8):
                damaged = theirs.copy()
                damaged[rng.integers(damaged.size, size=2)] ^= rng.integers(1, 256, 2).astype(np.uint8)
                counts["refused"] += compare(cpu, gpu, damaged, layout, x) is None
            counts["streams"] += 10
    return counts


def check_any_codes() -> int:
    """Decode streams of codes that no encoder writes; return how many."""
    rng = np.random.default_rng(1)
    sides = [n for n in fmt.BLOCKS if n > 1]
    for n in sides:
        layout = Layout.of([(max(64, 2048 // n**2) * n * n + 1,)])
        for largest in CODES:
            headers = np.array([(fmt.kind_of_block(n), 18, 17, -3)], fmt.TENSOR)
            codes = rng.integers(-largest, largest + 1, layout.total)
            chunk, words = encode_chunk(codes)
            geometry = fmt.lay_out(layout, headers)
            payload = stream.join(
                headers, geometry, np.array([chunk], "<u4"), np.empty(0, "<u2"), np.array(words, "<u2")
            )
            assert compare(Dct(), GpuDct(), payload, layout, gradient(layout, 2)) is not None
    return len(sides) * len(CODES)


def check_shared_chunks() -> int:
    """Decode streams whose chunks are several tiles, with gaps longer than one may be; return how many."""
    layout = Layout.of([(9 * fmt.TILE_VALUES + 5,), (300,)])
    x = np.zeros(layout.total, np.float32)
    x[np.arange(x.size) % (1 << 17) < 256] = 1
    x[fmt.TILE_VALUES : 3 * fmt.TILE_VALUES + 99] = 0
    sides = [8, 16, 32]
    for n in sides:
        cpu = Dct(transform="always", block=n, step=2.0)
        payload = cpu.encode(x, layout)
        assert stream.parse(payload, layout).headers["chunk_log2"][0] > fmt.TILE_LOG2
        assert compare(cpu, GpuDct(), payload, layout, gradient(layout, 4)) is not None
    return len(sides)


def compare(cpu: Dct, gpu: GpuDct, payload: np.ndarray, layout: Layout, x: np.ndarray) -> np.ndarray | None:
    """Decode with both, setting and adding; return the values, or None if both refuse."""
    results = []
    for weight in (None, 0.3):
        want = x.copy() if weight else np.full(layout.total, 9, np.float32)
        got = torch.from_numpy(want.copy()).cuda()
        refused = [False, False]
        try:
            cpu.decode(payload, layout, want, weight)
        except StreamError:
            refused[0] = True
        try:
            gpu.decode(payload, layout, got, weight)
        except StreamError:
            refused[1] = True
        assert refused[0] == refused[1], f"refused: {refused}"
        if not refused[0] or weight:
            assert (got.cpu().numpy().view(np.int32) == want.view(np.int32)).all(), "bits differ"
        results.append(None if refused[0] else want)
    return results[0]


def median_ms(call: Callable[[], Any], repeats: int = 31) -> float:
    times = []
    for _ in range(repeats + 3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[3:])


def measure(shapes: Sequence[tuple[int, ...]], options: dict[str, Any], profile: bool) -> dict[str, Any]:
    layout = Layout.of(shapes)
    x = torch.from_numpy(gradient(layout, 1)).cuda()
    codec = GpuDct(**options)
    out, left_over, copy = torch.zeros_like(x), torch.empty_like(x), torch.empty_like(x)
    payload = codec.encode(x, layout, left_over)
    codec.decode(payload, layout, out, 1.0)
    want = np.zeros(layout.total, np.float32)
    Dct(threads=8, **options).decode(payload.numpy(), layout, want)
    assert (out.cpu().numpy() == want).all(), "bits differ from the CPU's"
    if profile:
        for name, call in (
            ("encode", lambda: codec.encode(x, layout)),
            ("decode", lambda: codec.decode(payload, layout, out, 1.0)),
        ):
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as recorded:
                call()
                torch.cuda.synchronize()
            say(f"{name} {options}")
            for event in sorted(recorded.key_averages(), key=lambda e: -e.device_time_total)[:9]:
                say(f"  {event.device_time_total:9.0f} us {event.count:3d}x {event.key[:60]}")
    copy_ms = median_ms(lambda: copy.copy_(x))
    row: dict[str, Any] = {
        "options": codec.spec,
        "shapes": [list(shape) for shape in shapes][:2],
        "tensors": len(shapes),
        "mib": layout.total * 4 / 2**20,
        "bits_per_value": 8 * payload.numel() / layout.total,
        "copy_ms": copy_ms,
        "encode_ms": median_ms(lambda: codec.encode(x, layout)),
        "encode_keep_ms": median_ms(lambda: codec.encode(x, layout, left_over)),
        "decode_add_ms": median_ms(lambda: codec.decode(payload, layout, out, 1.0)),
    }
    copy_ms = min(copy_ms, median_ms(lambda: copy.copy_(x)))
    for name in ("encode", "encode_keep", "decode_add"):
        row[f"{name}_over_copy"] = row[f"{name}_ms"] / copy_ms
    return row


LINEAR: list[tuple[int, ...]] = [(4096, 4096)] * 4
CONV: list[tuple[int, ...]] = [*[(512, 512, 3, 3)] * 28, (512, 1984)]
CASES: list[tuple[list[tuple[int, ...]], dict[str, Any]]] = [
    (LINEAR, {"block": 8, "transform": "always", "step": 7.0}),
    (LINEAR, {"block": 8, "transform": "always", "bits": 0.1}),
    (LINEAR, {"block": 8, "transform": "always", "bits": 1.0}),
    (LINEAR, {"bits": 0.1}),
    (LINEAR, {"bits": 1.0}),
    (CONV, {"bits": 0.1, "transform": "always"}),
    (CONV, {"bits": 1.0, "transform": "always"}),
]


def codec(
    profile: Annotated[bool, typer.Option("--profile", help="List the slowest kernels too.")] = False,
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """Check that the GPU decodes as the CPU does, then time both ways beside a copy. Needs a GPU."""
    check_output(output)
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "check": {**check(), "any_codes": check_any_codes(), "shared_chunks": check_shared_chunks()},
        "rows": [],
    }
    say(str(report))
    for shapes, options in CASES:
        row = measure(shapes, options, profile)
        report["rows"].append(row)
        say(str({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}))
        deliver(report, output, as_json=False)
    deliver(report, output, as_json)


main = Command(codec, "benchmarks.gpu.codec", examples=("--profile", "--json --output gpu_codec.json"))

if __name__ == "__main__":
    main()
