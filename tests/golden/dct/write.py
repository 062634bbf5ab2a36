"""Write the golden streams of the codec `dct`: `python tests/golden/dct/write.py`.

A stream that was written once must decode to the same bits for ever, on every backend.
So these files are written anew only with a new version of the format. Of older versions, which
are refused, one stream each is kept.

`NAME.bin` is a stream. `expected.json` has, for each, its layout and the SHA-256 of
what it decodes to: set, and added with weight 1/3 to a ramp. Inputs come from integers
alone, so that this script writes the same bytes wherever it runs.
"""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from shoestring.codec.base import Layout, Payload, Vector
from shoestring.codec.dct.codec import Dct
from shoestring.codec.dct.format import BLOCKS, MAX_LEVEL
from tests.unit.codec.dct.streams import headers_of, write

FOLDER = Path(__file__).parent


def draw(size: int, seed: int) -> np.ndarray:
    """Integers from -2**15 to 2**15 - 1 by a congruential generator."""
    state, drawn = seed, []
    for _ in range(size):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        drawn.append((state >> 48) - 2**15)
    return np.array(drawn)


def peaked(size: int, seed: int) -> Vector:
    """Values with a peak at zero and tails: the product of two draws."""
    return (draw(size, seed) * draw(size, seed + 1) * 2.0**-31).astype(np.float32)


def encoded(shapes: list[tuple[int, ...]], **options) -> tuple[Layout, Payload]:
    layout = Layout.of(shapes)
    values = peaked(layout.total, len(shapes))
    return layout, Dct(backend="numpy", **options).encode(values, layout)


def blocks(n: int) -> tuple[Layout, Payload]:
    """Sparse codes, then a few that wrap, in blocks of n x n with a rest."""
    count = max(3, 1500 // (n * n))
    layout = Layout.of([(count * n * n + min(3, n * n - 1),)])
    codes = draw(layout.total, n)
    sparse = np.where(codes % 8 == 0, codes // 2048, 0)
    wrapping = np.where(codes % 16 == 1, np.clip(codes, -MAX_LEVEL, MAX_LEVEL), sparse)
    mixed = np.where(np.arange(layout.total) % 6 == 5, wrapping, sparse)
    return layout, write(layout, headers_of(n, mantissa=27, exponent=-9, chunk_log2=10), [mixed])


def far_apart() -> tuple[Layout, Payload]:
    """Two tiles of 3 x 3 blocks with a handful of codes, the last value among them."""
    layout = Layout.of([(300_001,)])
    tiles = [np.zeros(29_127 * 9, np.int64), np.zeros(300_001 - 29_127 * 9, np.int64)]
    for tile in tiles:
        tile[[0, 5, tile.size // 2, tile.size - 1]] = [1, -2, 300, -MAX_LEVEL]
    return layout, write(layout, headers_of(3, chunk_log2=18), tiles)


def shared() -> tuple[Layout, Payload]:
    """Five tiles, four of which share a chunk, with gaps longer than one may be."""
    layout = Layout.of([(5 * 2**18 + 3,)])
    tiles = [np.zeros(2**18, np.int64) for _ in range(4)] + [np.zeros(2**18 + 3, np.int64)]
    tiles[0][[1, 7]] = [3, -1]
    tiles[3][[5, 2**18 - 1]] = [MAX_LEVEL, 2]
    tiles[4][[2**18, 2**18 + 2]] = [-1, 1]
    return layout, write(layout, headers_of(8, chunk_log2=20), tiles)


CASES: dict[str, Callable[[], tuple[Layout, Payload]]] = {
    "nothing": lambda: encoded([]),
    "mixed": lambda: encoded([(8, 4, 3, 3), (30, 21), (10,), (0,), (), (300,)]),
    "kernels": lambda: encoded([(9, 4, 3, 3), (4, 3, 5, 5), (3, 2, 7, 7)], transform="always", step=0.5),
    "plain": lambda: encoded([(40, 20), (5,)], transform="never", small=0),
    "full": lambda: encoded([(20,), (2, 3)], small_as="float32"),
    "fine": lambda: encoded([(32, 17)], transform="always", step=0.02),
    "coarse": lambda: encoded([(64, 64)], step=4.0),
    "far apart": far_apart,
    "shared": shared,
} | {f"blocks {n}": lambda n=n: blocks(n) for n in BLOCKS}


def ramp(size: int) -> Vector:
    return (np.arange(size) - size // 2).astype(np.float32) / 64


def digest(values: Vector) -> str:
    return hashlib.sha256(values.astype("<f4").tobytes()).hexdigest()


def main() -> None:
    expected = {}
    for name, make in CASES.items():
        layout, payload = make()
        (FOLDER / f"{name.replace(' ', '_')}.bin").write_bytes(payload.tobytes())
        codec = Dct(backend="numpy")
        values, added = np.empty(layout.total, np.float32), ramp(layout.total)
        codec.decode(payload, layout, values)
        codec.decode(payload, layout, added, 1 / 3)
        expected[name] = {"shapes": layout.shapes, "set": digest(values), "added": digest(added)}
    (FOLDER / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main()
