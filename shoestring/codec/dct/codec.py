"""The codec `dct`: its options, and the steps from a bucket to a stream and back."""

import importlib
from collections.abc import Callable
from functools import cache, lru_cache
from itertools import groupby
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from shoestring.codec.base import Layout, Payload, Vector
from shoestring.codec.dct import format as stream
from shoestring.codec.dct import steps as steps_of
from shoestring.codec.dct.options import Options
from shoestring.codec.dct.plan import Floats, Wanted, plan
from shoestring.codec.options import ConfiguredCodec
from shoestring.errors import NonFiniteError, UsageError

_BACKENDS = {"numba": "shoestring.codec.dct.cpu", "numpy": "shoestring.codec.dct.reference"}


@cache
def _load(backend: str) -> ModuleType:
    return importlib.import_module(_BACKENDS[backend])


class Dct(ConfiguredCodec):
    """Quantised cosine coefficients with entropy coding: the fewest bytes."""

    name = "dct"
    options_type: ClassVar[type[Any]] = Options
    options: Options

    def __init__(self, *, threads: int = 1, backend: str = "numba", **options: Any) -> None:
        super().__init__(threads=threads, **options)
        if backend not in _BACKENDS:
            raise UsageError(f"no backend `{backend}`", hint=f"one of {', '.join(_BACKENDS)}")
        self.backend = backend

    @property
    def _engine(self) -> ModuleType:
        return _load(self.backend)

    def max_bytes(self, layout: Layout) -> int:
        tensors, values = len(layout.sizes), layout.total
        # A code takes at most 4 words; a chunk has a header and its states, a tile may end in one more.
        chunks = values // 1024 + tensors + values // stream.TILE_VALUES
        return stream.PREFIX.itemsize + stream.TENSOR.itemsize * tensors + 12 * chunks + 8 * values

    def _encode(self, values: Vector, layout: Layout, kept: Vector | None) -> Payload:
        energy, largest, bad = self._engine.scan(values, layout, self.threads)
        refuse_bad_tensor(bad, layout)

        def sample(wanted: Wanted, rms: Floats) -> HostSamples:
            scale = rms[_first(wanted)]
            return HostSamples(
                lambda relative: self._engine.costs(values, layout, wanted, relative * scale, self.threads)
            )

        headers, _ = plan(layout, self.options, energy, largest, sample)
        while True:
            geometry = stream.lay_out(layout, headers)
            steps = steps_of.of_headers(headers, largest)
            chunks, words, too_large = self._engine.encode(values, geometry, steps, kept, self.threads)
            if too_large < 0:
                break
            headers["chunk_log2"][too_large] = stream.SAFE_CHUNK_LOG2
        raw = _encode_raw(values, layout, headers, kept)
        return stream.join(headers, chunks, raw, words)

    def _decode(self, payload: Payload, layout: Layout, out: Vector, weight: float | None) -> None:
        parsed = stream.parse(payload, layout)
        raw = stream.raw_values(parsed, layout)
        if weight is None:
            out[:] = 0
        factor = np.float32(1 if weight is None else weight)
        self._engine.decode(parsed, steps_of.of_headers(parsed.headers), out, factor, self.threads)
        for start, tensor in raw:
            out[start : start + tensor.size] += factor * tensor


@lru_cache(maxsize=1024)
def _first(wanted: Wanted) -> NDArray[np.int64]:
    """The tensor of each pair."""
    return np.array([index for index, _ in wanted], np.int64)


class HostSamples:
    """Samples of a CPU backend, measured when they are asked for."""

    def __init__(self, measure: Callable[[float], tuple[Floats, Floats]]) -> None:
        self._measure = measure

    def costs(self, relative_step: float) -> tuple[Floats, Floats]:
        return self._measure(relative_step)

    def table(self) -> None:
        return None


def refuse_bad_tensor(bad: int, layout: Layout) -> None:
    """Raise for the tensor that a scan found not to be finite, if it found one."""
    if bad >= 0:
        raise NonFiniteError(
            f"tensor {bad} (shape {layout.shapes[bad]}) holds NaN or infinity",
            hint="skip this step, lower the learning rate, or clip the gradient",
        )


def _encode_raw(
    values: Vector, layout: Layout, headers: NDArray[np.void], kept: Vector | None
) -> list[NDArray[Any]]:
    """Return the bytes of the tensors sent as floats; fill `kept` for all that have no blocks.

    Tensors of one kind that follow each other are handled together: there may be many small ones.
    """
    parts: list[NDArray[Any]] = []
    kinds = headers["kind"].tolist()
    without_blocks = np.flatnonzero(headers["kind"] < stream.FIRST_BLOCK_KIND).tolist()
    for kind, run in groupby(without_blocks, kinds.__getitem__):
        indices = list(run)
        bounds = [(layout.offsets[index], layout.offsets[index + 1]) for index in indices]
        own = np.concatenate([values[start:end] for start, end in bounds])
        left = own
        if kind == stream.HALF:
            scale = np.ldexp(np.float32(1), headers["exponent"][indices])
            scale = np.repeat(scale, [end - start for start, end in bounds])
            half = (own / scale).astype("<f2")
            parts.append(half)
            left = own - half.astype(np.float32) * scale if kept is not None else own
        elif kind == stream.FULL:
            parts.append(own.astype("<f4"))
            left = np.zeros_like(own)
        if kept is not None:
            at = 0
            for start, end in bounds:
                kept[start:end] = left[at : at + end - start]
                at += end - start
    return parts
