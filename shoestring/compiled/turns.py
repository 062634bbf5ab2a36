"""Turns: counters by which several threads share a list of pieces of work.

A free thread takes the next piece. Dealing all pieces out beforehand would be simpler, but one core
may be busy with another program, or its thread may wake late. An array of turns holds two counters:
the number of the next piece, which every thread counts up atomically without waiting, and the
number of helpers that are done (`crew.py`).
"""

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from shoestring.compiled.jit import decode_jit
from shoestring.compiled.scratch import apart

Turns = NDArray[np.int64]

_TURNS = types.Array(types.int64, 1, "C")
_NEXT, _DONE, _SIZE = 0, 16, 17  # places of both counters, each in a cache line of its own
# A waiting thread looks `_LOOKS` times without a pause, then more often with `sched_yield` between
# looks: some milliseconds for the next phase of a call, a fraction of one for the next call.
_LOOKS, _PATIENT_LOOKS, _IDLE_LOOKS = 2_000, 20_000, 500


def new_turns() -> Turns:
    return apart(_SIZE, np.int64)


def _data(context, builder, turns):
    return cgutils.create_struct_proxy(_TURNS)(context, builder, turns).data


@intrinsic
def take_turns(context, turns, count):
    """Return the first of the next `count` numbers; no other thread gets any of them."""

    def generate(context, builder, signature, args):
        return builder.atomic_rmw("add", _data(context, builder, args[0]), args[1], "monotonic")

    return types.int64(_TURNS, types.int64), generate


@intrinsic
def _add(context, turns, place, count):
    """Add to a counter; a thread that reads the sum also sees everything this thread wrote before."""

    def generate(context, builder, signature, args):
        pointer = builder.gep(_data(context, builder, args[0]), [args[1]])
        return builder.atomic_rmw("add", pointer, args[2], "acq_rel")

    return types.int64(_TURNS, types.int64, types.int64), generate


@intrinsic
def _look(context, turns, place):
    """Return a counter that other threads change."""

    def generate(context, builder, signature, args):
        pointer = builder.gep(_data(context, builder, args[0]), [args[1]])
        return builder.load_atomic(pointer, "acquire", 8, typ=ir.IntType(64))

    return types.int64(_TURNS, types.int64), generate


@intrinsic
def _let_others_run(context):
    def generate(context, builder, signature, args):
        function = ir.FunctionType(ir.IntType(32), [])
        return builder.call(cgutils.get_or_insert_function(builder.module, function, "sched_yield"), [])

    return types.int32(), generate


@decode_jit
def take_turn(turns):
    """Return the number of the next piece."""
    return take_turns(turns, 1)


@decode_jit
def _await_other(turns, known, patience):
    for k in range(_LOOKS + patience):
        seen = _look(turns, _NEXT)
        if seen != known:
            return seen
        if k > _LOOKS:
            _let_others_run()
    return known


@decode_jit
def watch(turns):
    """Wait until a thread has taken a turn; return the next turn, or 0 after too long a time."""
    return _await_other(turns, 0, _PATIENT_LOOKS)


@decode_jit
def linger(turns, known):
    """Wait a little, until the next turn differs from `known`."""
    _await_other(turns, known, _IDLE_LOOKS)


@decode_jit
def give_back(turns):
    """Count one more helper that is done."""
    _add(turns, _DONE, 1)


@decode_jit
def await_count(turns, count):
    """Wait until `count` helpers are done."""
    k = 0
    while _look(turns, _DONE) < count:
        k += 1
        if k > _LOOKS:
            _let_others_run()
