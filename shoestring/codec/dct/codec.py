"""The codec `dct`: its options, and the steps from a bucket to a stream and back."""

import importlib
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from shoestring.codec.base import Layout, Payload, Vector
from shoestring.codec.dct import format as stream
from shoestring.codec.dct import steps as steps_of
from shoestring.codec.dct.plan import Choice, empty_headers, fill_header, natural_block, relative_step_of
from shoestring.codec.options import ConfiguredCodec
from shoestring.errors import NonFiniteError, UsageError

# Tensors whose steps could leave the range of exponents.
TOO_SMALL, TOO_LARGE = 2.0**-80, 2.0**95

_BACKENDS = {"numba": "shoestring.codec.dct.cpu", "numpy": "shoestring.codec.dct.reference"}


@dataclass(frozen=True)
class Options:
    """What `dct` can be told.

    block: side of the blocks, 4, 8, 16 or 32; 0: a convolution's own kernel, 8 for the rest
    transform: `auto` chooses per tensor by measured rate; `always`; `never`
    step: quantisation step over the tensor's rms, where no budget is given
    bits: budget of bits a value over the bucket, instead of a step
    small: tensors of fewer values are sent as floats
    small_as: `float16` (with a power of two as its scale) or `float32`
    """

    block: int = 0
    transform: str = "auto"
    step: float = 2.0
    bits: float | None = None
    small: int = 256
    small_as: str = "float16"

    def __post_init__(self) -> None:
        _require(self.block in (0, 4, 8, 16, 32), "`block` must be 4, 8, 16 or 32, or 0 to fit each tensor")
        _require(self.transform in ("auto", "always", "never"), "`transform` must be auto, always or never")
        _require(2.0**-8 <= self.step <= 2.0**10, "`step` must be from 0.004 to 1024")
        _require(self.bits is None or 0 < self.bits <= 32, "`bits` must be above 0 and at most 32")
        _require(0 <= self.small <= 1 << 20, "`small` must be from 0 to 1048576")
        _require(self.small_as in ("float16", "float32"), "`small_as` must be float16 or float32")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise UsageError(message, hint="`shoestring codecs` lists the options and their defaults")


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
        return importlib.import_module(_BACKENDS[self.backend])

    def max_bytes(self, layout: Layout) -> int:
        tensors, values = len(layout.sizes), layout.total
        # A code takes at most 4 words; a chunk has a header and its states, a tile may end in one more.
        chunks = values // 1024 + tensors + values // stream.TILE_VALUES
        return stream.PREFIX.itemsize + stream.TENSOR.itemsize * tensors + 12 * chunks + 8 * values

    def _encode(self, values: Vector, layout: Layout, kept: Vector | None) -> Payload:
        energy, largest, bad = self._engine.scan(values, layout)
        if bad >= 0:
            raise NonFiniteError(
                f"tensor {bad} (shape {layout.shapes[bad]}) holds NaN or infinity",
                hint="skip this step, lower the learning rate, or clip the gradient",
            )
        headers = self._plan(values, layout, energy, largest)
        while True:
            geometry = stream.lay_out(layout, headers)
            steps = steps_of.of_headers(headers, largest)
            chunks, words, too_large = self._engine.encode(values, geometry, steps, kept, self.threads)
            if too_large < 0:
                break
            headers["chunk_log2"][too_large] = stream.SAFE_CHUNK_LOG2
        raw = _encode_raw(values, layout, headers, kept)
        return stream.join(headers, chunks, raw, words)

    def _plan(
        self, values: Vector, layout: Layout, energy: NDArray[np.float64], largest: NDArray[np.float64]
    ) -> NDArray[np.void]:
        headers = empty_headers(layout)
        choices: dict[int, Choice] = {}
        spent = 0.0
        for index, size in enumerate(layout.sizes):
            if largest[index] < TOO_SMALL:
                continue  # nothing worth sending; all of it is kept
            if largest[index] > TOO_LARGE:
                headers["kind"][index] = stream.FULL
                spent += 32.0 * size
                continue
            if size < self.options.small:
                spent += _plan_small(headers[index : index + 1], self.options.small_as, size, largest[index])
                continue
            tensor = values[layout.offsets[index] : layout.offsets[index + 1]]
            rms = float(np.sqrt(energy[index] / size))
            samples = [(n, self._engine.Sample(tensor, n)) for n in self._candidates(layout.shapes[index])]
            choices[index] = Choice(size, rms, samples)
        relative = relative_step_of(list(choices.values()), self.options.step, self.options.bits, spent)
        for index, choice in choices.items():
            fill_header(headers[index : index + 1], choice, largest[index], relative)
        return headers

    def _candidates(self, shape: tuple[int, ...]) -> list[int]:
        block = self.options.block or natural_block(shape, 8)
        return {"auto": [1, block], "always": [block], "never": [1]}[self.options.transform]

    def _decode(self, payload: Payload, layout: Layout, out: Vector, weight: float | None) -> None:
        parsed = stream.parse(payload, layout)
        raw = stream.raw_values(parsed, layout)
        if weight is None:
            out[:] = 0
        factor = np.float32(1 if weight is None else weight)
        self._engine.decode(parsed, steps_of.of_headers(parsed.headers), out, factor, self.threads)
        for start, tensor in raw:
            out[start : start + tensor.size] += factor * tensor


def _plan_small(header: NDArray[np.void], form: str, size: int, largest: float) -> float:
    if form == "float32":
        header["kind"] = stream.FULL
        return 32.0 * size
    header["kind"] = stream.HALF
    header["exponent"] = np.frexp(largest)[1] - 15  # the largest lands in [2**14, 2**15)
    return 16.0 * size


def _encode_raw(
    values: Vector, layout: Layout, headers: NDArray[np.void], kept: Vector | None
) -> list[NDArray[Any]]:
    """Return the bytes of the tensors sent as floats; fill `kept` for all that have no blocks."""
    parts: list[NDArray[Any]] = []
    for index, kind in enumerate(headers["kind"].tolist()):
        if kind >= stream.FIRST_BLOCK_KIND:
            continue
        span = slice(layout.offsets[index], layout.offsets[index + 1])
        sent = np.zeros(layout.sizes[index], np.float32)
        if kind == stream.HALF:
            scale = np.float32(2.0 ** int(headers["exponent"][index]))
            half = (values[span] / scale).astype("<f2")
            sent = half.astype(np.float32) * scale
            parts.append(half)
        elif kind == stream.FULL:
            sent = values[span]
            parts.append(sent.astype("<f4"))
        if kept is not None:
            np.subtract(values[span], sent, out=kept[span])
    return parts
