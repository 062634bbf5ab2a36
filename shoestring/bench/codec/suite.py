"""What a codec costs and saves: one row a codec, set of gradients and number of threads.

Rates are float32 bytes a second, against a plain copy timed before, between and
after. Several threads are timed while the machine has as many cores to give them.
A codec that does not keep its promises is refused, not timed.
"""

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

from shoestring.bench.codec.check import normalised_error, verify
from shoestring.bench.codec.entropy import entropy_gap
from shoestring.bench.codec.gradients import Bucket
from shoestring.bench.machine import Cores, Memcpy
from shoestring.codec import registry
from shoestring.codec.base import Codec
from shoestring.codec.options import ConfiguredCodec, write_options

# Measured on several threads too.
MAIN = (
    "dct:block=8,step=5.5",  # about 0.1 bit a value
    "dct:block=8,step=1.4",  # about 1
    "dct:block=8,bits=0.1",
    "dct:block=8,bits=1",
    "dct",
)
_PLAIN = ("float32", "float16", "bfloat16", "int8", "topk:ratio=0.01")
_RATES = (0.02, 0.1, 0.5, 1, 2, 4)
FULL_SPECS = (
    *MAIN,
    *(f"dct:bits={bits}" for bits in _RATES),
    "dct:transform=never",
    *(f"dct:transform=never,bits={bits}" for bits in _RATES),
    *_PLAIN,
)
QUICK_SPECS = (*MAIN[:2], "dct:bits=0.1", "dct", "dct:transform=never", "float16", "int8", "topk:ratio=0.01")


@dataclass(frozen=True)
class Effort:
    """How long a figure is measured: at least so many times, and so many seconds."""

    repeats: int = 5
    seconds: float = 0.3
    copy_mib: int = 256


FULL = Effort()
QUICK = Effort(repeats=3, seconds=0.08, copy_mib=128)
_MOST_REPEATS = 200
_BURST_S = 0.02  # of calls, between two looks at the cores
_PATIENCE = 10  # times as long as an effort: then what there is counts


@dataclass(frozen=True)
class Row:
    """One codec on one set of gradients. `decode` adds with a weight; `feedback` fills `left_over` too."""

    codec: str
    options: str
    backend: str  # `numpy`, `numba` or `triton`
    threads: int
    gradients: str
    values: int
    bytes: int
    bits_per_value: float
    nmse: float  # see `check.normalised_error`
    entropy_gap: float | None  # see `entropy.entropy_gap`; None for codecs without entropy coding
    encode_gbps: float
    feedback_gbps: float
    decode_gbps: float
    memcpy_gbps: float  # on one thread, whatever `threads` is
    core_scaling: float | None  # what so many threads of plain arithmetic gained meanwhile; None for one
    encode_over_memcpy: float
    decode_over_memcpy: float
    correct: bool  # always true: what is wrong raises

    @property
    def spec(self) -> str:
        return f"{self.codec}:{self.options}" if self.options else self.codec


def build(spec: str, threads: int = 1, backend: str | None = None) -> Codec:
    """Build a codec, on another backend than its own where one is given and it has several."""
    codec = registry.make(spec, threads=threads)
    if backend is None or not (isinstance(codec, ConfiguredCodec) and hasattr(codec, "backend")):
        return codec
    return type(codec)(threads=threads, backend=backend, **asdict(codec.options))


def backend_of(codec: Codec) -> str:
    """Name what runs a codec; those without a choice are plain NumPy."""
    return str(getattr(codec, "backend", "numpy"))


def plan(
    specs: Sequence[str], threads: Sequence[int], *, everywhere: bool, backend: str | None = None
) -> list[Codec]:
    """List what to measure: `threads` for `MAIN`, or everywhere; NumPy has one thread in any case."""
    codecs = []
    for spec in specs:
        single = backend_of(build(spec, backend=backend)) == "numpy"
        wanted = threads if (everywhere or spec in MAIN) and not single else threads[:1]
        codecs += [build(spec, 1 if single else count, backend) for count in wanted]
    return codecs


def measure(codec: Codec, bucket: Bucket, memcpy: Memcpy, effort: Effort = FULL) -> Row:
    """Verify a codec on a bucket, then time it there."""
    values, layout = bucket.values, bucket.layout
    coded = verify(codec, bucket)
    left_over, out = values.copy(), values.copy()

    cores = Cores(getattr(codec, "threads", 1))
    copies = memcpy.sample(2)
    encode_s = time_call(lambda: codec.encode(values, layout), effort, cores)
    copies += memcpy.sample()
    feedback_s = time_call(lambda: codec.encode(values, layout, left_over), effort, cores)
    copies += memcpy.sample()
    decode_s = time_call(lambda: codec.decode(coded.payload, layout, out, 0.5), effort, cores)
    copies += memcpy.sample(2)

    copy_gbps = statistics.median(copies)
    gigabytes = values.nbytes / 1e9
    return Row(
        codec=codec.name,
        options=write_options(codec.options) if isinstance(codec, ConfiguredCodec) else "",
        backend=backend_of(codec),
        threads=cores.threads,
        gradients=bucket.name,
        values=values.size,
        bytes=coded.payload.nbytes,
        bits_per_value=8 * coded.payload.nbytes / max(values.size, 1),
        nmse=normalised_error(coded.values, values, layout),
        entropy_gap=entropy_gap(coded.payload, layout) if codec.name == "dct" else None,
        encode_gbps=gigabytes / encode_s,
        feedback_gbps=gigabytes / feedback_s,
        decode_gbps=gigabytes / decode_s,
        memcpy_gbps=copy_gbps,
        core_scaling=statistics.median(cores.seen) if cores.seen else None,
        encode_over_memcpy=gigabytes / encode_s / copy_gbps,
        decode_over_memcpy=gigabytes / decode_s / copy_gbps,
        correct=True,
    )


def time_call(call: Callable[[], object], effort: Effort, cores: Cores) -> float:
    """Return the median seconds of a call that follows another, with the garbage collector off.

    Calls count if every thread had a core before and after them. To look at the cores takes many
    times as long as a call, so the call that comes next does not count.
    """
    counted: list[float] = []
    every: list[float] = []
    patient = replace(effort, repeats=_PATIENCE * effort.repeats, seconds=_PATIENCE * effort.seconds)
    collecting = gc.isenabled()
    gc.disable()
    try:
        while not _is_enough(counted, effort) and not _is_enough(every, patient):
            were_there = cores.are_there()
            burst: list[float] = []
            call()
            while sum(burst) < _BURST_S:
                start = time.perf_counter()
                call()
                burst.append(time.perf_counter() - start)
            every += burst
            if were_there and cores.are_there():
                counted += burst
    finally:
        if collecting:
            gc.enable()
    return statistics.median(counted or every)


def _is_enough(times: list[float], effort: Effort) -> bool:
    return len(times) >= effort.repeats and (sum(times) >= effort.seconds or len(times) >= _MOST_REPEATS)
