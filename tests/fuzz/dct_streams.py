"""Good streams to start from, and ways to spoil them, for the fuzzer of the codec `dct`.

Blind mutations mostly die in the parser. Those that know the format keep every length
consistent, so that the entropy decoder and the inverse transform run on what they made.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from random import Random

import numpy as np

from shoestring.codec.base import Layout
from shoestring.codec.dct import format as fmt
from shoestring.codec.dct import stream
from shoestring.codec.dct.codec import Dct
from tests.unit.codec.dct.streams import headers_of, sparse_codes, write

LAYOUTS = tuple(
    Layout.of(shapes)
    for shapes in (
        [(500,)],
        [(3000,)],
        [(9, 4, 3, 3), (10,), (40, 8)],
        [(4, 3, 5, 5), (0,), (2, 2, 7, 7)],
        [(1025,), (7,), (1,)],
        [(3 * fmt.TILE_VALUES + 5,), (40,)],
    )
)
LARGE = len(LAYOUTS) - 1  # tiles that share a chunk; takes a hundred times as long as the others
_INTERESTING = (0, 1, 2, 3, 4, 9, 10, 11, 15, 16, 18, 19, 31, 32, 100, 101, 127, 128, 155, 156, 254, 255)


@dataclass(frozen=True)
class Seed:
    """A good stream, taken apart."""

    layout: int
    payload: bytes
    tensors: int
    chunks_at: int
    words_at: int
    chunks: tuple[tuple[int, bytes], ...]  # (header, words)

    @classmethod
    def of(cls, layout: int, payload: np.ndarray) -> "Seed":
        parsed = stream.parse(payload, LAYOUTS[layout])
        starts = parsed.word_starts.tolist()
        words = [parsed.words[a:b].tobytes() for a, b in pairwise(starts)]
        chunks = tuple(zip(parsed.chunks.tolist(), words, strict=True))
        at = parsed.geometry
        return cls(layout, payload.tobytes(), len(LAYOUTS[layout].sizes), at.chunks_at, at.words_at, chunks)

    def rebuild(self, chunks: list[tuple[int, bytes]]) -> bytearray:
        """Join the stream again with other chunks; their headers are made to fit their words."""
        heads = b"".join(
            (header >> 18 << 18 | len(words) // 2).to_bytes(4, "little") for header, words in chunks
        )
        raw = self.payload[self.chunks_at + 4 * len(self.chunks) : self.words_at]
        return bytearray(self.payload[: self.chunks_at] + heads + raw + b"".join(w for _, w in chunks))


def seeds() -> list[Seed]:
    """Streams of encoders, and of codes that no encoder would write."""
    made = []
    for index, layout in enumerate(LAYOUTS[:LARGE]):
        rng = np.random.default_rng(index)
        values = rng.laplace(0, 1, layout.total).astype(np.float32)
        for options in (
            {},
            {"transform": "always", "step": 0.5, "small": 0},
            {"transform": "never", "step": 5.0, "small": 0},
            {"block": 16, "transform": "always", "small_as": "float32"},
        ):
            made.append(Seed.of(index, Dct(backend="numpy", **options).encode(values, layout)))
        for share, most in ((0.003, 3), (0.3, fmt.MAX_LEVEL), (1.0, 2)):
            sides = [int(n) for n in rng.choice(fmt.BLOCKS, len(layout.sizes))]
            headers = headers_of(*sides, chunk_log2=10)
            tiles = fmt.lay_out(layout, headers).tiles[:, fmt.TILE_SIZE].tolist()
            codes = [sparse_codes(size, rng, share, most) for size in tiles]
            if most == fmt.MAX_LEVEL:  # and levels that stand for zeros
                codes = [np.where(rng.random(own.size) < 0.1, fmt.NO_CODE, own) for own in codes]
            made.append(Seed.of(index, write(layout, headers, codes)))
    return made + [large_seed(n, chunk_log2) for n in (1, 3, 8, 32) for chunk_log2 in (18, 19, 20)]


def large_seed(n: int, chunk_log2: int) -> Seed:
    """A few codes, some of them at the ends of tiles, and gaps longer than one may be."""
    layout, rng = LAYOUTS[LARGE], np.random.default_rng(n)
    headers = headers_of(n, n, chunk_log2=chunk_log2)
    sizes = fmt.lay_out(layout, headers).tiles[:, fmt.TILE_SIZE].tolist()
    shares = [1e-4, 0, 1e-4, 0.2, 0.2][: len(sizes)]
    codes = [sparse_codes(size, rng, share, 300) for size, share in zip(sizes, shares, strict=True)]
    codes[0][[0, -1]] = codes[2][-1] = 3
    return Seed.of(LARGE, write(layout, headers, codes))


Mutation = Callable[[Seed, list[Seed], Random], bytearray]


def flip_bits(seed: Seed, others: list[Seed], rng: Random) -> bytearray:
    data = bytearray(seed.payload)
    for _ in range(rng.randint(1, 8)):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return data


def change_bytes(seed: Seed, others: list[Seed], rng: Random) -> bytearray:
    data = bytearray(seed.payload)
    for _ in range(rng.randint(1, 4)):
        data[rng.randrange(len(data))] = rng.choice(_INTERESTING)
    return data


def truncate(seed: Seed, others: list[Seed], rng: Random) -> bytearray:
    return bytearray(seed.payload[: rng.randrange(len(seed.payload))])


def lengthen(seed: Seed, others: list[Seed], rng: Random) -> bytearray:
    data = bytearray(seed.payload)
    at = rng.randrange(len(data) + 1)
    data[at:at] = rng.randbytes(rng.randint(1, 16))
    return data


def splice(seed: Seed, others: list[Seed], rng: Random) -> bytearray:
    other = rng.choice(others).payload
    at = rng.randrange(len(seed.payload))
    return bytearray(seed.payload[:at] + other[min(at, len(other)) :])


def rewrite_header(seed: Seed, others: list[Seed], rng: Random) -> bytearray:
    data = bytearray(seed.payload)
    for _ in range(rng.randint(1, 3)):
        data[rng.randrange(seed.chunks_at)] = rng.choice(_INTERESTING)
    return data


def change_lengths(seed: Seed, others: list[Seed], rng: Random) -> bytearray:
    data = bytearray(seed.payload)
    if seed.chunks:
        at = seed.chunks_at + 4 * rng.randrange(len(seed.chunks))
        head = int.from_bytes(data[at : at + 4], "little") ^ 1 << rng.randrange(18)
        data[at : at + 4] = head.to_bytes(4, "little")
    return data


def change_words(seed: Seed, others: list[Seed], rng: Random) -> bytearray:
    """Change words, or the states before them, and nothing else."""
    data = bytearray(seed.payload)
    if len(data) > seed.words_at:
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(seed.words_at, len(data))] = rng.randrange(256)
    return data


def change_tables(seed: Seed, others: list[Seed], rng: Random) -> bytearray:
    chunks = [(rng.randrange(1 << 14) << 18, words) for _, words in seed.chunks]
    return seed.rebuild(chunks)


def move_words(seed: Seed, others: list[Seed], rng: Random) -> bytearray:
    """Move the border between two chunks; the sum stays."""
    chunks = list(seed.chunks)
    if len(chunks) > 1:
        k = rng.randrange(len(chunks) - 1)
        (first, left), (second, right) = chunks[k], chunks[k + 1]
        joined = left + right
        cut = 2 * rng.randint(0, len(joined) // 2)
        chunks[k : k + 2] = [(first, joined[:cut]), (second, joined[cut:])]
    return seed.rebuild(chunks)


def drop_or_repeat_words(seed: Seed, others: list[Seed], rng: Random) -> bytearray:
    chunks = list(seed.chunks)
    if chunks:
        k = rng.randrange(len(chunks))
        header, words = chunks[k]
        at, length = 2 * rng.randint(0, len(words) // 2), 2 * rng.randint(1, 4)
        words = words[:at] + (words[at + length :] if rng.random() < 0.5 else words[max(at - length, 0) :])
        chunks[k] = (header, words)
    return seed.rebuild(chunks)


def exchange_chunks(seed: Seed, others: list[Seed], rng: Random) -> bytearray:
    """Take whole chunks of other streams: most of what comes out decodes."""
    pool = [chunk for other in rng.sample(others, 2) for chunk in other.chunks]
    chunks = [rng.choice(pool) if pool and rng.random() < 0.5 else chunk for chunk in seed.chunks]
    return seed.rebuild(chunks)


def change_step_and_block(seed: Seed, others: list[Seed], rng: Random) -> bytearray:
    """Other block sizes and steps, all of them allowed: codes mean something else."""
    data = bytearray(seed.payload)
    kinds = data[fmt.PREFIX_BYTES : fmt.PREFIX_BYTES + seed.tensors]
    coded = [tensor for tensor, kind in enumerate(kinds) if kind >= fmt.FIRST_BLOCK_KIND]
    with_exponent = [tensor for tensor, kind in enumerate(kinds) if kind == fmt.HALF or tensor in coded]
    exponents_at = fmt.PREFIX_BYTES + seed.tensors
    for k, tensor in enumerate(coded):
        data[fmt.PREFIX_BYTES + tensor] = rng.randrange(fmt.FIRST_BLOCK_KIND, fmt.KINDS)
        exponent = rng.randint(fmt.MIN_EXPONENT, fmt.MAX_EXPONENT) & 0xFF
        data[exponents_at + with_exponent.index(tensor)] = exponent
        size_at = exponents_at + len(with_exponent) + k
        chunk_log2 = rng.choice((data[size_at] >> 4, rng.randint(0, fmt.MAX_CHUNK_LOG2 - fmt.MIN_CHUNK_LOG2)))
        data[size_at] = chunk_log2 << 4 | rng.randrange(16)
    return data


MUTATIONS: tuple[Mutation, ...] = (
    flip_bits,
    change_bytes,
    truncate,
    lengthen,
    splice,
    rewrite_header,
    change_lengths,
    change_words,
    change_words,
    change_tables,
    move_words,
    drop_or_repeat_words,
    exchange_chunks,
    exchange_chunks,
    change_step_and_block,
    change_step_and_block,
)
