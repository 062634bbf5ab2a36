"""The probability tables of the entropy coder, fixed once and for all.

Gaps between non-zero codes and magnitudes of codes are coded with the same
alphabet: 36 symbols, a symbol for each of 0..3 and two for each octave above,
followed by the bits that place the value within its symbol.

A table is a discrete Lomax distribution, `P(value >= k) = (a*m / (a*m + k))**a`:
`m` sets the scale, `a` the tail. With a = 16 it is nearly geometric, what
independent codes give; with a = 1/2 it has the long tail of codes that come in
clusters, as those of gradients do. A chunk names the two tables that cost it
least, so no frequencies are sent. Everything here is integer arithmetic, so all
machines hold the same tables.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

SYMBOLS = 36
PROBABILITY_BITS = 12
_TOTAL = 1 << PROBABILITY_BITS
_FRACTION_BITS = 40

SCALES = 32  # a tail: half octaves from 2**lowest
TAILS = ((16, -3), (2, -4), (1, -5), (0.5, -8))  # (a, log2 of the lowest m)
TABLES = SCALES * len(TAILS)

COST_ONE_BIT = 256


def _symbol_starts() -> list[int]:
    starts = [0, 1, 2, 3]
    for octave in range(2, 18):
        starts += [1 << octave, 3 << (octave - 1)]
    return starts


def _survival(tail: float, scale: int, k: int) -> int:
    """Return `2**40 * P(value >= k)`, rounded down; `scale` is 512 m."""
    one = 1 << _FRACTION_BITS
    if tail == 0.5:
        return math.isqrt(one * one * scale // (scale + (k << 10)))
    power = int(tail)
    return int(one * (power * scale) ** power // (power * scale + (k << 9)) ** power)


def _frequencies(tail: float, scale: int) -> list[int]:
    tops = [_survival(tail, scale, k) for k in _symbol_starts()] + [0]
    free = _TOTAL - SYMBOLS  # each symbol keeps one slot, so that any value can be coded
    freqs = [1 + ((tops[s] - tops[s + 1]) * free >> _FRACTION_BITS) for s in range(SYMBOLS)]
    freqs[freqs.index(max(freqs))] += _TOTAL - sum(freqs)
    return freqs


def _build() -> NDArray[np.uint32]:
    rows = [
        _frequencies(tail, (2 + step % 2) << (lowest + 8 + step // 2))
        for tail, lowest in TAILS
        for step in range(SCALES)
    ]
    return np.array(rows, np.uint32)


def _fixed(array: NDArray[Any]) -> NDArray[Any]:
    array.flags.writeable = False
    return array


FREQ: NDArray[np.uint32] = _fixed(_build())  # [TABLES, SYMBOLS], rows sum to 4096
CUM: NDArray[np.uint32] = _fixed(np.cumsum(FREQ, axis=1, dtype=np.uint32) - FREQ)
SLOT: NDArray[np.uint8] = _fixed(  # [TABLES, 4096]: the symbol that owns each slot
    np.stack([np.repeat(np.arange(SYMBOLS, dtype=np.uint8), row) for row in FREQ])
)
START: NDArray[np.int32] = _fixed(np.array(_symbol_starts(), np.int32))  # first value of a symbol
EXTRA: NDArray[np.uint8] = _fixed(  # bits that place a value within its symbol
    np.array([0, 0, 0, 0] + [s // 2 - 1 for s in range(4, SYMBOLS)], np.uint8)
)
COST: NDArray[np.int32] = _fixed(  # [TABLES, SYMBOLS], in 1/256 bit; only encoders look at it
    np.rint(COST_ONE_BIT * np.log2(_TOTAL / FREQ.astype(np.float64))).astype(np.int32)
)
