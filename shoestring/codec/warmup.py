"""Load or compile the kernels of `dct` before anything waits for them.

Compiling takes the better part of a minute, once on a machine, and holds Python's lock: a
thread that must answer in time cannot do so meanwhile.
"""

import numpy as np

from shoestring.codec.base import Layout
from shoestring.codec.registry import make
from shoestring.compiled import crew
from shoestring.compiled.store import compiled_once

_SHAPES = [(64, 64), (16, 8, 3, 3), (8, 8, 5, 5), (300,), (5,)]


def warm_up_dct(threads: int = 1) -> None:
    """Encode and decode a small bucket with and without the transform: runs every kernel once."""
    layout = Layout.of(_SHAPES)
    values = np.random.default_rng(0).standard_normal(layout.total, np.float32)
    left_over = np.empty_like(values)
    with compiled_once():
        for form in ("always", "never"):
            codec = make(f"dct:transform={form}", threads=threads)
            payload = codec.encode(values, layout, left_over)
            codec.decode(payload, layout, values)
            codec.decode(payload, layout, values, 1.0)
        crew.warm_up()
