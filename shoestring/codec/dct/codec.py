"""The codec `dct`: its options and backends. The work is in `coding.py`, loaded when there is some."""

import importlib
from functools import cache
from types import ModuleType
from typing import Any, ClassVar

from shoestring.codec.base import Layout, Payload, Vector
from shoestring.codec.dct import format as fmt
from shoestring.codec.dct.options import Options
from shoestring.codec.options import ConfiguredCodec
from shoestring.errors import UsageError

_BACKENDS = {"numba": "cpu.backend", "numpy": "reference"}


@cache
def _load(module: str) -> ModuleType:
    return importlib.import_module(f"shoestring.codec.dct.{module}")


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

    def max_bytes(self, layout: Layout) -> int:
        tensors, values = len(layout.sizes), layout.total
        # A code takes at most 4 words; a chunk has a header and its states, a tile may end in one more.
        chunks = values // 1024 + tensors + values // fmt.TILE_VALUES
        return fmt.headers_bytes(tensors, tensors, tensors) + 12 * chunks + 8 * values

    def _encode(self, values: Vector, layout: Layout, left_over: Vector | None) -> Payload:
        engine = self._engine(layout)
        payload: Payload = _load("coding").encode(
            engine, self.options, values, layout, left_over, self.threads
        )
        return payload

    def _decode(self, payload: Payload, layout: Layout, out: Vector, weight: float | None) -> None:
        engine = self._engine(layout)
        _load("coding").decode(engine, payload, layout, out, weight, self.threads)

    def _engine(self, layout: Layout) -> ModuleType:
        """The backend, with the kernels loaded that this layout needs."""
        if self.backend == "numba":
            importlib.import_module("shoestring.codec.warmup").prepare_dct((layout,), self.options)
        return _load(_BACKENDS[self.backend])
