"""Encode a bucket to a stream and decode a stream, with any CPU backend.

A backend is a module with `CHUNKING`, `scan`, `costs`, `encode` and `decode`: `cpu/`, or
`reference.py`. Buckets on a GPU are coded by `gpu/codec.py`.
"""

from collections.abc import Callable
from math import log
from types import ModuleType

import numpy as np

from shoestring.codec.base import Layout, Payload, Vector
from shoestring.codec.dct import floats, stream
from shoestring.codec.dct.choice import Floats, Question, ask
from shoestring.codec.dct.format import SAFE_CHUNK_LOG2, lay_out
from shoestring.codec.dct.options import Options
from shoestring.codec.dct.steps import of_headers
from shoestring.codec.rate import common_step
from shoestring.compiled.crew import Crew
from shoestring.errors import NonFiniteError

_CLOSE = 0.1  # of a budget, as a logarithm: a sample says no more, and between looks the rate is a power


def encode(
    engine: ModuleType,
    options: Options,
    values: Vector,
    layout: Layout,
    left_over: Vector | None,
    threads: int,
) -> Payload:
    """Turn checked values into a stream; fill `left_over` where given."""
    with Crew(threads) as crew:
        return _encode(engine, options, values, layout, left_over, crew)


def _encode(
    engine: ModuleType, options: Options, values: Vector, layout: Layout, left_over: Vector | None, crew: Crew
) -> Payload:
    energy, largest, bad = engine.scan(values, layout, crew)
    refuse_bad_tensor(bad, layout)
    question = ask(layout, options)

    def look(relative: float) -> Floats:
        costs: Floats = engine.costs(values, layout, question, energy, largest, relative, crew)
        return costs

    step, looked_at, costs = _find_step(engine, question, energy, largest, look)
    headers, _ = question.answer(
        energy, largest, step, np.array([looked_at]), costs[..., None], engine.CHUNKING
    )
    while True:
        steps = of_headers(headers, largest)
        payload: Payload | None
        payload, too_large = engine.encode(values, headers, lay_out(layout, headers), steps, left_over, crew)
        if payload is not None:
            return payload
        headers["chunk_log2"][too_large] = SAFE_CHUNK_LOG2


def _find_step(
    engine: ModuleType, question: Question, energy: Floats, largest: Floats, look: Callable[[float], Floats]
) -> tuple[float, float, Floats]:
    """Return the step over rms, the nearest step whose costs were measured, and its costs."""
    step = question.options.step
    if question.options.bits is None:
        return step, step, look(step)
    budget, values = question.budget(largest, engine.CHUNKING)
    if not values:
        return step, step, np.zeros((2, len(question.wanted)))
    seen: dict[float, Floats] = {}

    def modelled_bits(relative: float) -> float:
        seen[relative] = look(relative)
        return question.modelled_bits(energy, largest, relative, seen[relative])

    step = common_step(modelled_bits, budget_bits=budget, values=values, close=_CLOSE)
    if not seen:
        seen[step] = look(step)
    nearest = min(seen, key=lambda known: abs(log(known / step)))
    return step, nearest, seen[nearest]


def decode(
    engine: ModuleType, payload: Payload, layout: Layout, out: Vector, weight: float | None, threads: int
) -> None:
    """Decode into checked `out`."""
    parsed = stream.parse(payload, layout)
    if weight is None:
        out[:] = 0
    factor = np.float32(1 if weight is None else weight)
    with Crew(threads) as crew:
        engine.decode(parsed, out, factor, crew)
    floats.add(parsed.floats, parsed.geometry, out, factor)


def refuse_bad_tensor(bad: int, layout: Layout) -> None:
    """Raise `NonFiniteError` if a scan found a tensor with NaN or infinity."""
    if bad >= 0:
        raise NonFiniteError(
            f"tensor {bad} (shape {layout.shapes[bad]}) holds NaN or infinity",
            hint="skip this step, lower the learning rate, or clip the gradient",
        )
