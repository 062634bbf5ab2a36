"""The codec's constants on a device: bases as matrices, probability tables."""

from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoestring.codec.dct.basis import BASIS_SCALE, integer_basis
from shoestring.codec.dct.gpu.places import tile_of, to_device
from shoestring.codec.dct.tables import COST, CUM, FREQ, PROBABILITY_BITS, SLOT

COST_BINS = 64
DIGIT = 512


def _kronecker(n: int) -> NDArray[np.int64]:
    """Return [frequency, place]: how much each frequency adds at each place of a block."""
    depth = tile_of(n).depth
    square = np.zeros((depth, depth), np.int64)
    basis = integer_basis(n).astype(np.int64)
    square[: n * n, : n * n] = np.kron(basis, basis)
    return square


@cache
def forward_matrix(n: int, device: torch.device) -> Tensor:
    """Return [place, frequency] as floats."""
    return to_device((_kronecker(n).T / BASIS_SCALE**2).astype(np.float32), device)


@cache
def inverse_digits(n: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the matrix [frequency, place] as `512 * high + low`, both exact in float16."""
    matrix = _kronecker(n)
    high = matrix // DIGIT
    return (
        to_device(high.astype(np.float16), device),
        to_device((matrix - DIGIT * high).astype(np.float16), device),
    )


@cache
def cost_table(device: torch.device) -> Tensor:
    cost = np.zeros((len(COST), COST_BINS), np.int16)
    cost[:, : COST.shape[1]] = COST
    return to_device(cost, device)


@cache
def span_table(device: torch.device) -> Tensor:
    """Return each symbol's frequency and, above 12 bits, where its slots begin."""
    return to_device((FREQ | CUM << 12).astype(np.uint32).view(np.int32), device)


@cache
def reciprocal_table(device: torch.device) -> Tensor:
    """Return 2**32 over each possible frequency, rounded down to what fits 32 bits."""
    freq = np.maximum(np.arange(1 << PROBABILITY_BITS, dtype=np.int64), 1)
    reciprocal = np.minimum((1 << 32) // freq, (1 << 32) - 1)
    return to_device(reciprocal.astype(np.uint32).view(np.int32), device)


@cache
def slot_table(device: torch.device) -> Tensor:
    """Return the symbol that owns each slot."""
    return to_device(SLOT.view(np.int8), device)
