"""Samples on the GPU: what `cpu/measure.py` does, for all tensors of a bucket in a few launches.

The costs of a range of steps come back at once, so that a search for a step asks the
GPU nothing more; between two of them the rate is close to a power of the step.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from shoestring.codec.base import Layout
from shoestring.codec.dct.choice import Floats, Question
from shoestring.codec.dct.gpu import lists, transform
from shoestring.codec.dct.gpu.places import Groups, cut, group_blocks, pinned, tile_of, to_device
from shoestring.codec.dct.gpu.tables import cost_table, forward_matrix
from shoestring.codec.dct.options import Options
from shoestring.codec.dct.sampling import lanes_of, run_starts, sample_shape
from shoestring.codec.rate import typical_step

_LOWEST, _HIGHEST, _NEAR = -10, 10, 4  # steps over rms that are searched, in half octaves
SEGMENT = 1 << 14


def step_ranges(options: Options) -> tuple[tuple[float, ...], ...]:
    """Return the steps over rms to measure: those near where a budget is usually met, then all."""
    if options.bits is None:
        return ((options.step,),)
    usual = round(2 * np.log2(typical_step(options.bits)[0]))
    near = np.clip(usual, _LOWEST + _NEAR, _HIGHEST - _NEAR) + np.arange(-_NEAR, _NEAR + 1)
    both = near, np.arange(_LOWEST, _HIGHEST + 1)
    return tuple(tuple(np.exp2(halves / 2).tolist()) for halves in both)


@dataclass(frozen=True)
class _Runs:
    """Where the samples with one block size are taken from: runs of values, or groups of blocks."""

    start: Tensor
    out_start: Tensor
    size: Tensor
    groups: Groups


@dataclass(frozen=True)
class Measured:
    """Measurements of a bucket, in pinned memory; valid once the device is done."""

    energy: Floats  # of tensors
    largest: Floats  # magnitude
    relative: Floats  # steps over rms
    costs: Floats  # [bits, errors] a value of [samples, steps]


@dataclass(frozen=True)
class Samples:
    """Which samples of a bucket are measured, and at which steps."""

    relative: Floats
    steps: Tensor  # the same, on the device
    tensor: Tensor  # of each sample
    start: Tensor  # among the coefficients
    size: Tensor
    total: int
    nothing: Tensor  # a step for coefficients that are neither snapped nor quantised
    runs: dict[int, _Runs]
    segment_begin: Tensor  # each tensor's first segment, and their number
    segment_start: Tensor
    segment_size: Tensor
    tensor_size: Tensor

    def measure(self, values: Tensor) -> Measured:
        """Start to measure; wait for the device before reading what is returned."""
        device, tensors, segments = values.device, self.tensor_size.numel(), self.segment_start.numel()
        shape = (2, self.tensor.numel(), self.relative.size)
        if not segments:
            return Measured(np.zeros(tensors), np.zeros(tensors), self.relative, np.zeros(shape))
        sums = torch.empty((2, segments), dtype=torch.float64, device=device)
        transform.scan_kernel(
            (segments,), values, self.segment_start, self.segment_size, sums, segments, BLOCK=1024
        )
        # All else is done while that runs. Kernels write what the host will read into pinned memory.
        found = pinned(8 * (2 * tensors + math.prod(shape))).view(torch.float64)
        rms = torch.empty(tensors, dtype=torch.float32, device=device)
        transform.sum_kernel(
            (tensors,), sums, self.segment_begin, self.tensor_size, found, rms, segments, tensors, BLOCK=256
        )
        if self.tensor.numel():
            self._take(values, rms, found[2 * tensors :])
        numbers = found.numpy()
        energy, largest = numbers[: 2 * tensors].reshape(2, tensors)
        return Measured(energy, largest, self.relative, numbers[2 * tensors :].reshape(shape))

    def _take(self, values: Tensor, rms: Tensor, costs: Tensor) -> None:
        """Transform the samples and say what they cost at each step."""
        device = values.device
        coefficients = torch.empty(max(self.total, 1), dtype=torch.float32, device=device)
        for n, runs in self.runs.items():
            if n == 1:
                transform.gather_kernel((runs.start.numel(),),
                    values, coefficients, runs.start, runs.out_start, runs.size, BLOCK=lanes_of(1),
                )  # fmt: skip
                continue
            tile, groups = tile_of(n), runs.groups
            transform.forward_kernel((groups.count, tile.columns),
                values, coefficients, groups.rows, self.nothing, forward_matrix(n, device),
                AREA=n * n, D=tile.depth, TILE=tile.side, B=groups.blocks,
                ALIGN=groups.align, PLANE=groups.plane, COEFFICIENTS=True,
            )  # fmt: skip
        lists.cost_kernel((self.tensor.numel(), self.relative.size),
            coefficients, self.start, self.size, self.tensor, rms, self.steps, cost_table(device), costs,
            BLOCK=4096, num_warps=8,
        )  # fmt: skip


@lru_cache(maxsize=1024)  # a large model has hundreds of parts
def find_samples(
    layout: Layout, question: Question, relative: tuple[float, ...], device: torch.device
) -> Samples:
    """Return the samples of a bucket: each wanted (tensor, block size) at each step over rms."""
    starts, sizes, total = [], [], 0
    rows: dict[int, list[tuple[int, int, int, int]]] = {}
    for index, n in question.wanted:
        groups, runs, each = sample_shape(layout.sizes[index], n)
        starts.append(total)
        for k, first in enumerate(run_starts(layout.sizes[index], n) if each else []):
            out_start = total + k // runs * runs * each * n * n + k % runs * each
            place = layout.offsets[index] + first * n * n
            rows.setdefault(n, []).append((place, out_start, runs * each, each))
        total += groups * runs * each * n * n
        sizes.append(total - starts[-1])
    tensor_sizes = np.array(layout.sizes, np.int64)
    owner, first_value, segment_size = cut(tensor_sizes, SEGMENT)
    return Samples(
        relative=np.array(relative),
        steps=to_device(np.array(relative, np.float32), device),
        tensor=to_device(question.tensor.astype(np.int32), device),
        start=to_device(np.array(starts, np.int64), device),
        size=to_device(np.array(sizes, np.int32), device),
        total=total,
        nothing=torch.zeros(1, dtype=torch.float32, device=device),
        runs={n: _find_runs(n, np.array(row, np.int64), device) for n, row in rows.items()},
        segment_begin=to_device(np.searchsorted(owner, np.arange(tensor_sizes.size + 1)), device),
        segment_start=to_device(np.array(layout.offsets, np.int64)[owner] + first_value, device),
        segment_size=to_device(segment_size.astype(np.int32), device),
        tensor_size=to_device(tensor_sizes, device),
    )


def _find_runs(n: int, rows: np.ndarray, device: torch.device) -> _Runs:
    start, out_start, stride, blocks = rows.T.copy()
    groups = group_blocks(n, start, out_start, stride, blocks, np.zeros_like(start), device)
    return _Runs(
        to_device(start, device),
        to_device(out_start, device),
        to_device(blocks.astype(np.int32), device),
        groups,
    )
