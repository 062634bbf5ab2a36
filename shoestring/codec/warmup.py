"""Have the kernels of `dct` loaded before anything waits for them: those that a model's shapes need.

What is not on disk is compiled in processes of their own (`compiled/ahead.py`), a block size each:
`python -m shoestring.codec.warmup BLOCK`.
"""

import sys
import threading
from collections.abc import Callable, Iterable
from functools import lru_cache, partial

import numpy as np

from shoestring.codec.base import Layout
from shoestring.codec.dct.choice import ask
from shoestring.codec.dct.options import Options
from shoestring.codec.registry import make
from shoestring.compiled import crew
from shoestring.compiled.ahead import have_ready

_USUAL = (1, 3, 5, 8)
_KERNELS = (3, 5, 7)  # blocks that only convolutions have
_SMALL = (300,), (5,)

_lock = threading.Lock()
_ready: set[int] = set()
_inside = threading.local()


def _silent(text: str) -> None:
    pass


_tell: Callable[[str], None] = _silent


def tell(say: Callable[[str], None]) -> None:
    """Have `say` told what is compiled from now on, where nobody else is named to be told."""
    global _tell
    _tell = say


def warm_up_dct(say: Callable[[str], None] = _silent) -> None:
    """Load or compile what usual models need; `say` is told before anything is compiled."""
    _have_ready(_USUAL, say)


def prepare_dct(
    layouts: Iterable[Layout], options: Options, say: Callable[[str], None] | None = None
) -> None:
    """Load or compile what coding and decoding vectors of these layouts takes.

    `say` is told before anything is compiled. Any thread may call it; it is quick where all is loaded.
    """
    wanted = frozenset().union(*(_blocks_of(layout, options) for layout in layouts))
    if not wanted <= _ready and not getattr(_inside, "running", False):
        _have_ready(wanted, say or _tell)


@lru_cache(maxsize=1024)  # a large model has hundreds of parts
def _blocks_of(layout: Layout, options: Options) -> frozenset[int]:
    return frozenset(n for _, n in ask(layout, options).wanted) | {1}


def _have_ready(blocks: Iterable[int], say: Callable[[str], None]) -> None:
    with _lock:
        wanted = sorted(set(blocks) - _ready, key=lambda n: (n == 1, n == 8, -n))  # the quickest last
        jobs = {f"{n}x{n}": partial(run_all, n) for n in wanted}
        have_ready("shoestring.codec.warmup", jobs, lambda text: say(f"{text} (the blocks of codec `dct`)"))
        _ready.update(wanted)


def run_all(n: int) -> None:
    """Encode and decode a small bucket with blocks of one size: runs every kernel once."""
    _inside.running = True
    try:
        layout = Layout.of([(16, 8, n, n), (5,)] if n in _KERNELS else [(64, 64)] if n > 1 else _SMALL)
        values = np.random.default_rng(0).standard_normal(layout.total, np.float32)
        left_over = np.empty_like(values)
        block = f",block={n}" if n not in (*_KERNELS, 8, 1) else ""
        codec = make(f"dct:transform={'always' if n > 1 else 'never'}{block}")
        payload = codec.encode(values, layout, left_over)
        codec.decode(payload, layout, values)
        codec.decode(payload, layout, values, 1.0)
        if n == 1:
            crew.warm_up()
    finally:
        _inside.running = False


if __name__ == "__main__":
    import gc

    from shoestring.codec import warmup  # this module as the codec knows it

    gc.disable()  # a compiler leaves much behind; looking through it takes a tenth of the time
    warmup.run_all(int(sys.argv[1].partition("x")[0]))
