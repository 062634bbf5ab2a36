"""Samples on the GPU: what `measure.Sample` does, for all tensors of a bucket in a few launches.

The costs of a range of steps come back at once, so that a search for a step asks the
GPU nothing more; between two of them the rate is close to a power of the step.
"""

from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np
import torch
from torch import Tensor

from shoestring.codec.base import Layout
from shoestring.codec.dct.gpu import entropy, transform
from shoestring.codec.dct.gpu.places import Groups, group_blocks, tile_of, to_device
from shoestring.codec.dct.gpu.tables import cost_table, forward_matrix
from shoestring.codec.dct.options import Options
from shoestring.codec.dct.plan import Floats, Wanted
from shoestring.codec.dct.sampling import MAX_GROUPS, lanes_of, run_starts, sample_shape

_SEARCH_RANGE = 2.0 ** np.arange(-5, 5.5, 0.5)
GROUPS = MAX_GROUPS // 2


class Curves:
    """The costs of all samples at some steps; between them, their interpolation."""

    def __init__(self, relative: Floats, bits: Floats, errors: Floats) -> None:
        self._at = np.log2(relative)
        self._bits = np.log2(bits + 1e-9)  # [samples, steps]
        self._errors = errors

    def only(self, chosen: list[int]) -> "Curves":
        """Return the curves of these samples alone."""
        return Curves(np.exp2(self._at), np.exp2(self._bits[chosen]) - 1e-9, self._errors[chosen])

    def table(self) -> tuple[Floats, Floats, Floats]:
        return np.exp2(self._at), np.exp2(self._bits), self._errors

    def costs(self, relative_step: float) -> tuple[Floats, Floats]:
        place = np.interp(np.log2(relative_step), self._at, np.arange(self._at.size))
        left = min(int(place), max(self._at.size - 2, 0))
        right = min(left + 1, self._at.size - 1)
        share = place - left
        bits = self._bits[:, left] * (1 - share) + self._bits[:, right] * share
        errors = self._errors[:, left] * (1 - share) + self._errors[:, right] * share
        return np.exp2(bits), errors


@dataclass(frozen=True)
class _Places:
    tensor: Tensor  # a sample
    start: Tensor  # among the coefficients
    size: Tensor
    sizes: Floats
    total: int
    zeros: Tensor
    nothing: Tensor  # steps for coefficients that are neither snapped nor quantised
    rows: dict[int, tuple[Tensor, Groups]]  # n: (start, blocks, start among coefficients, stride) a run


@lru_cache(maxsize=64)
def _find(layout: Layout, wanted: tuple[tuple[int, int], ...], device: torch.device) -> _Places:
    starts, sizes, total = [], [], 0
    rows: dict[int, list[tuple[int, int, int, int]]] = {}
    for index, n in wanted:
        groups, runs, each = sample_shape(layout.sizes[index], n, GROUPS)
        starts.append(total)
        for k, first in enumerate(run_starts(layout.sizes[index], n, GROUPS) if each else []):
            out_start = total + k // runs * runs * each * n * n + k % runs * each
            place = layout.offsets[index] + first * n * n
            rows.setdefault(n, []).append((place, each, out_start, runs * each))
        total += groups * runs * each * n * n
        sizes.append(total - starts[-1])
    tables = {n: np.array(row, np.int64).T for n, row in rows.items()}
    return _Places(
        tensor=to_device(np.array([index for index, _ in wanted], np.int32), device),
        start=to_device(np.array(starts, np.int64), device),
        size=to_device(np.array(sizes, np.int32), device),
        sizes=np.maximum(np.array(sizes, np.float64), 1),
        total=total,
        zeros=torch.zeros(
            max((len(row) for row in rows.values()), default=1), dtype=torch.int32, device=device
        ),
        nothing=torch.zeros(1, dtype=torch.float32, device=device),
        rows={
            n: (
                to_device(np.ascontiguousarray(table), device),
                group_blocks(n, np.arange(table.shape[1]), table[1], device),
            )
            for n, table in tables.items()
        },
    )


def relative_steps(options: Options) -> Floats:
    """Return the steps over rms that a plan may ask for."""
    return np.array([options.step]) if options.bits is None else _SEARCH_RANGE


def sample(values: Tensor, layout: Layout, wanted: Wanted, rms: Tensor, relative: Floats) -> Tensor:
    """Start measuring each wanted (tensor, block size) at each step; return what will hold the costs."""
    device = values.device
    results = torch.empty((2, len(wanted), relative.size), dtype=torch.float32, device=device)
    if not wanted:
        return results
    places = _find(layout, tuple(wanted), device)
    coefficients = torch.empty(max(places.total, 1), dtype=torch.float32, device=device)
    for n, ((start, blocks, out_start, stride), groups) in places.rows.items():
        if n == 1:
            transform.gather_kernel[(start.numel(),)](
                values, coefficients, start, out_start, blocks, BLOCK=lanes_of(1)
            )
        elif groups.count:
            tile = tile_of(n)
            transform.forward_kernel[(groups.count, tile.columns)](
                values, coefficients, groups.tile, groups.first, start, blocks, out_start, stride,
                places.zeros, places.nothing, places.nothing, places.nothing, forward_matrix(n, device),
                AREA=n * n, D=tile.depth, TILE=tile.side, B=groups.blocks, COEFFICIENTS=True,
            )  # fmt: skip
    entropy.cost_kernel[(len(wanted), relative.size)](
        coefficients, places.start, places.size, places.tensor, rms, _steps(tuple(relative), device),
        cost_table(device), results, BLOCK=4096, num_warps=8,
    )  # fmt: skip
    return results


def curves(results: Tensor, layout: Layout, wanted: Wanted, relative: Floats) -> Curves:
    """Read the costs that `sample` measured."""
    places = _find(layout, tuple(wanted), results.device)
    bits, errors = results.cpu().numpy().astype(np.float64) / places.sizes[:, None]
    return Curves(relative, bits, errors)


@cache
def _steps(relative: tuple[float, ...], device: torch.device) -> Tensor:
    return to_device(np.array(relative, np.float32), device)
