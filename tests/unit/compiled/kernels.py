"""Three modules of kernels, each of which calls into the next, for tests that edit them."""

import sys
import types

SOURCES = {
    "top": '''
"""The module's docstring."""
from shoestring.compiled.jit import decode_jit, specialise
from middle import middle

width = 0

@decode_jit
def top(x):
    """Sum something."""
    total = 0
    for i in range(x.size):
        total += middle(x[i])  # a comment
    return total

def _template(x):
    return width * x.size + middle(x[0])

special = specialise(decode_jit, _template, 2, width=2)
''',
    "middle": '''
from shoestring.compiled.jit import decode_jit
import leaf

@decode_jit
def middle(x):
    """Ask the leaf."""
    return leaf.leaf(x) + leaf.OFFSET + add_one(x)

@decode_jit
def add_one(x):
    return x + 1
''',
    "leaf": '''
import numpy as np
from numba import types
from numba.extending import intrinsic
from shoestring.compiled.jit import decode_jit

FACTOR, OFFSET, SIGNS, UNUSED = 3, 7, (1, -1), 5
TABLE = np.arange(4, dtype=np.int64)

def _emit(builder, value):
    """Emit an instruction."""
    return builder.neg(value)

@intrinsic
def negate(context, x):
    """Return the negative."""
    def generate(context, builder, signature, args):
        return _emit(builder, args[0])
    return types.int64(types.int64), generate

@decode_jit
def leaf(x):
    """Look into the table."""
    return negate(x) * FACTOR + TABLE[x & 3] * SIGNS[0]
''',
}


def load(monkeypatch, sources: dict[str, str]) -> types.ModuleType:
    """Execute the modules anew; return `top`."""
    for name in reversed(sources):
        module = types.ModuleType(name)
        monkeypatch.setitem(sys.modules, name, module)
        exec(compile(sources[name], f"{name}.py", "exec"), vars(module))
    return sys.modules["top"]


def edited(module: str, old: str, new: str) -> dict[str, str]:
    assert SOURCES[module].count(old) == 1
    return {**SOURCES, module: SOURCES[module].replace(old, new)}
