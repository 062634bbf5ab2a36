"""How far a `dct` stream is from the entropy of the codes in it.

The yardstick is order-0: each code by itself, its chances those found in its own
tensor, told for free. A coder that adapts within a tensor can do better than that,
so the gap may be negative.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from shoestring.codec.base import Layout, Payload
from shoestring.codec.dct import format as fmt
from shoestring.codec.dct.cpu.backend import decode_entries
from shoestring.codec.dct.stream import Stream, parse
from shoestring.compiled.crew import Crew


def entropy_gap(payload: Payload, layout: Layout) -> float | None:
    """Return how much larger a `dct` payload is than its entropy, as a share; None if that is 0."""
    bits = ideal_bits(payload, layout)
    return payload.nbytes * 8 / bits - 1 if bits else None


def ideal_bits(payload: Payload, layout: Layout) -> float:
    """Add up, over tensors, the entropy of the codes, or the floats where floats are sent."""
    parsed = parse(payload, layout)
    total = 0.0
    levels: dict[int, list[NDArray[np.int16]]] = {}
    for tensor, found in _levels(parsed):
        levels.setdefault(tensor, []).append(found)
    for tensor, size in enumerate(layout.sizes):
        kind = int(parsed.headers["kind"][tensor])
        if kind == fmt.HALF or kind == fmt.FULL:
            total += size * (16 if kind == fmt.HALF else 32)
        elif kind >= fmt.FIRST_BLOCK_KIND and size:
            nonzero = np.concatenate(levels.get(tensor, [np.empty(0, np.int16)]))
            total += size * entropy(nonzero, zeros=size - nonzero.size)
    return total


def entropy(nonzero: NDArray[np.int16], zeros: int) -> float:
    """Return the order-0 entropy, in bits a code, of these codes and so many zeros."""
    _, counts = np.unique(nonzero, return_counts=True)
    counts = np.append(counts, zeros)
    shares = counts[counts > 0] / max(counts.sum(), 1)
    return float(-(shares * np.log2(shares)).sum())


def _levels(parsed: Stream) -> Iterator[tuple[int, NDArray[np.int16]]]:
    """Go through the chunks: the tensor, and its codes that are not zero."""
    entries, places, counts = decode_entries(parsed, Crew(threads=1))
    for chunk, tensor in enumerate(parsed.geometry.chunk_rows[:, fmt.CHUNK_TENSOR].tolist()):
        levels = entries[places[chunk] : places[chunk] + counts[chunk]] & 0xFFFF
        signed = np.where(levels & 1, -1 - (levels >> 1), 1 + (levels >> 1))
        yield tensor, signed.astype(np.int16)
