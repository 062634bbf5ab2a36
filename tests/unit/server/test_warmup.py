"""After the warm-up a shard compiles nothing more."""

import json
import subprocess
import sys

from shoestring.server import rules
from shoestring.server.warmup import warm_up

# In a process of its own: here others may have compiled them. What comes over the wire is read-only.
CODE = """
import json
import numpy as np
from shoestring.codec.base import Layout
from shoestring.codec.dct.cpu import adder
from shoestring.codec.dct.cpu import backend as cpu
from shoestring.codec.dct.cpu import measure
from shoestring.codec.dct.cpu import decoder
from shoestring.compiled import turns
from shoestring.codec.registry import make
from shoestring.server.warmup import warm_up

def compiled():
    sizes = [kernel(n) for n in (1, 3, 5, 8) for kernel in (cpu._encoder, adder.adder, measure._measurer)]
    waiting = turns.watch, turns.linger, turns.give_back, turns.await_count
    return [len(kernel.signatures) for kernel in (decoder.decode_chunks, measure._scan, *waiting, *sizes)]

warm_up()
before = compiled()
layout = Layout.of([(32, 16, 3, 3), (16, 8, 5, 5), (96, 64), (300,), (7,)])
for form in ("always", "never"):
    codec = make(f"dct:transform={form},step=1.5")
    values = np.random.default_rng(0).standard_normal(layout.total, np.float32)
    payload = bytes(codec.encode(values, layout, np.empty_like(values)))
    codec.decode(memoryview(payload), layout, values)
    codec.decode(memoryview(payload), layout, values, 0.5)
print(json.dumps([before, compiled()]))
"""


def test_every_rule_is_compiled():
    warm_up()
    compiled = [*rules.SGD, *rules.MOMENTUM, *rules.ADAM, *rules.AMSGRAD, rules._sum_squares]
    assert all(kernel.signatures for kernel in compiled)


def test_coding_a_bucket_that_came_over_the_wire_compiles_nothing():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    before, after = json.loads(done.stdout)
    assert all(before)
    assert after == before
