"""The codec's constants on a device: bases as matrices, probability tables."""

from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoestring.codec.dct.basis import BASIS_SCALE, integer_basis
from shoestring.codec.dct.gpu.places import tile_of, to_device
from shoestring.codec.dct.tables import COST, CUM, EXTRA, FREQ, SLOT

COST_BINS, COST_DIGIT = 32, 64
DIGIT = 512
MOST_IN_A_DIGIT = 127


def _kronecker(n: int) -> NDArray[np.int64]:
    """Return [frequency, place]: how much each frequency adds at each place of a block."""
    depth = tile_of(n).depth
    square = np.zeros((depth, depth), np.int64)
    basis = integer_basis(n).astype(np.int64)
    square[: n * n, : n * n] = np.kron(basis, basis)
    return square


@cache
def forward_matrix(n: int, device: torch.device) -> Tensor:
    """Return [frequency, place] as float16: what the transform multiplies each value by."""
    return to_device((_kronecker(n) / BASIS_SCALE**2).astype(np.float16), device)


@cache
def inverse_basis(n: int, device: torch.device) -> tuple[Tensor, int]:
    """Return two matrices [frequency, place], exact in float16, and a limit.

    The basis is 512 times the first plus the second. Codes of a block whose magnitudes add up to the
    limit at most give less than 2**23, and each of them is one digit.
    """
    matrix = _kronecker(n)
    high = matrix // DIGIT
    limit = min(MOST_IN_A_DIGIT, (1 << 23) // int(np.abs(matrix).max()))
    return to_device(np.stack([high, matrix - DIGIT * high]).astype(np.float16), device), limit


@cache
def cost_table(device: torch.device) -> Tensor:
    """Return [digit, symbol, table]: costs in 1/256 bit as two digits, the low one first."""
    cost = COST.T[:COST_BINS]
    digits = np.stack([cost % COST_DIGIT, cost // COST_DIGIT])
    return to_device(digits.astype(np.float16), device)


@cache
def span_table(device: torch.device) -> Tensor:
    """Return each symbol's frequency, above 12 bits where its slots begin, above 24 its extra bits."""
    extra = EXTRA.astype(np.uint32) << 24
    return to_device((FREQ | CUM << 12 | extra).astype(np.uint32).view(np.int32), device)


@cache
def reciprocal_table(device: torch.device) -> Tensor:
    """Return 2**32 over each symbol's frequency, rounded down to what fits 32 bits."""
    reciprocal = np.minimum((1 << 32) // FREQ.astype(np.int64), (1 << 32) - 1)
    return to_device(reciprocal.astype(np.uint32).view(np.int32), device)


@cache
def slot_table(device: torch.device) -> Tensor:
    """Return the symbol that owns each slot."""
    return to_device(SLOT.view(np.int8), device)
