"""Pieces of work that several threads take from one list, each the next as soon as it is free.

Dealing them out beforehand would be simpler, but the cores of a machine are not alike: one
is shared with another program, or its thread wakes late. `turns` is an array of one number,
zero at first, that all of them count up; nobody waits.
"""

import numpy as np
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from shoestring.codec.dct.jit import decode_jit
from shoestring.codec.scratch import apart

_TURNS = types.Array(types.int64, 1, "C")


def new_turns() -> NDArray[np.int64]:
    return apart(1, np.int64)


@intrinsic
def take_turns(context, turns, count):
    """Return the first of the next `count` numbers; no other thread gets any of them."""

    def generate(context, builder, signature, args):
        data = cgutils.create_struct_proxy(_TURNS)(context, builder, args[0]).data
        return builder.atomic_rmw("add", data, args[1], "monotonic")

    return types.int64(_TURNS, types.int64), generate


@decode_jit
def take_turn(turns):
    """Return the number of the next piece."""
    return take_turns(turns, 1)
