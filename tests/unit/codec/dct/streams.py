"""Streams made from chosen codes, and what becomes of them: the tests' own way in.

A stream is written with the pure-Python coder, so any code at any place can be had,
those that no encoder would choose among them.
"""

from collections.abc import Sequence
from types import ModuleType

import numpy as np

from shoestring.codec.base import Layout, Payload, Vector
from shoestring.codec.dct import format as fmt
from shoestring.codec.dct import reference, stream
from shoestring.codec.dct.codec import Dct
from shoestring.codec.dct.cpu import backend as cpu
from shoestring.codec.dct.steps import Steps, of_headers
from shoestring.compiled.crew import Crew

NOTHING = np.empty(0, "<u2")
BACKENDS: dict[str, ModuleType] = {"numba": cpu, "numpy": reference}


def headers_of(*kinds: int, chunk_log2: int = 12, mantissa: int = 16, exponent: int = -4) -> np.ndarray:
    """One header a tensor: blocks of n x n for each `n` given, by default with a step of 1."""
    rows = [(fmt.kind_of_block(n), chunk_log2, mantissa, exponent) for n in kinds]
    return np.array(rows, fmt.TENSOR)


def write(layout: Layout, headers: np.ndarray, tiles: Sequence[np.ndarray]) -> Payload:
    """Write the stream with these codes, one array in planar order a tile."""
    geometry = fmt.lay_out(layout, headers)
    assert [codes.size for codes in tiles] == geometry.tiles[:, fmt.TILE_SIZE].tolist()
    chunks, words = [], []
    for codes in reference.cut_chunks(geometry, [codes.astype(np.int64) for codes in tiles]):
        header, own = reference.encode_chunk(codes)
        chunks.append(header)
        words.append(np.array(own, "<u2"))
    words_of_all = np.concatenate([NOTHING, *words])
    return stream.join(headers, geometry, np.array(chunks, fmt.CHUNK), NOTHING, words_of_all)


def read(payload: Payload, layout: Layout) -> list[np.ndarray]:
    """Return the codes of every tile."""
    return reference.decode_codes(stream.parse(payload, layout))


def encode_with(
    backend: str, values: Vector, layout: Layout, headers: np.ndarray, left_over: Vector | None = None
) -> tuple[Payload, int]:
    """Encode with chosen headers, all of them blocks; return the stream and the tensor that is too large."""
    _, largest, _ = reference.scan(values, layout, Crew(1))
    geometry = fmt.lay_out(layout, headers)
    steps = of_headers(headers, largest)
    payload, too_large = BACKENDS[backend].encode(values, headers, geometry, steps, left_over, Crew(1))
    return payload, too_large


def decode(backend: str, payload, layout: Layout, out: Vector | None = None, weight=None) -> Vector:
    """Decode into fresh memory full of NaN, or add to a copy of `out`."""
    out = np.full(layout.total, np.nan, np.float32) if out is None else out.copy()
    Dct(backend=backend).decode(payload, layout, out, weight)
    return out


def steps_of(payload: Payload, layout: Layout, values: Vector) -> tuple[np.ndarray, Steps]:
    """Return a stream's tensor headers, and its steps as its encoder had them."""
    headers = stream.parse(payload, layout).headers
    _, largest, _ = reference.scan(values, layout, Crew(1))
    return headers, of_headers(headers, largest)


def sparse_codes(size: int, rng: np.random.Generator, share: float = 0.1, most: int = 20) -> np.ndarray:
    """Random codes, `share` of them not zero."""
    codes = rng.integers(1, most + 1, size) * rng.choice([-1, 1], size)
    return np.where(rng.random(size) < share, codes, 0)
