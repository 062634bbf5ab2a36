"""What each part of the exchange is worth: the same training with one of them left out.

All workers and the shard are in one process and take turns, with the codec and the feedback that
real ones use, so bytes and scores are those of a real run without its links. The whole is local
steps with `dct` both ways; every variant says what it has instead.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.train.rates import rate_of
from benchmarks.train.workloads import Workload
from shoestring.codec.base import Codec, Layout, Vector
from shoestring.codec.feedback import Feedback
from shoestring.codec.registry import make

WORKERS = 2
_FLOAT = 4


@dataclass(frozen=True)
class Variant:
    """An exchange, by what it is made of."""

    name: str
    h: int = 4  # local steps a round
    codec: str = "dct:step=1.5"
    reply: str = "dct:step=1.5"
    has_feedback: bool = True
    goes_on: bool = True  # from the parameters that were agreed on plus what was not sent yet
    warmup: int = 0  # first steps that are exchanged each, uncompressed
    late: int = 0  # steps after which the answer of a round is applied


WHOLE = Variant("the whole")
VARIANTS = (
    WHOLE,
    replace(WHOLE, name="uncompressed", codec="float32", reply="float32"),
    replace(
        WHOLE, name="no transform", codec="dct:step=1.5,transform=never", reply="dct:step=1.5,transform=never"
    ),
    replace(
        WHOLE,
        name="transform everywhere",
        codec="dct:step=1.5,transform=always",
        reply="dct:step=1.5,transform=always",
    ),
    replace(WHOLE, name="blocks of 8 everywhere", codec="dct:step=1.5,block=8", reply="dct:step=1.5,block=8"),
    replace(WHOLE, name="no feedback", has_feedback=False),
    replace(WHOLE, name="going on from what was agreed on alone", goes_on=False),
    replace(WHOLE, name="answers uncompressed", reply="float32"),
    replace(WHOLE, name="int8, without entropy coding", codec="int8", reply="int8"),
    replace(WHOLE, name="warm-up of 40 steps", warmup=40),
    replace(WHOLE, name="every 2 steps", h=2),
    replace(WHOLE, name="every 8 steps", h=8),
    replace(WHOLE, name="coarser: step 2.5", codec="dct:step=2.5", reply="dct:step=2.5"),
)
DEFAULT = replace(WHOLE, name="local steps", codec="dct:step=2", reply="dct:step=2")
LOCAL = (
    DEFAULT,
    replace(DEFAULT, name="nothing is kept", has_feedback=False),
    replace(DEFAULT, name="answers one step late", late=1),
    replace(DEFAULT, name="answers two steps late", late=2),
)


def measure(
    workload: Workload,
    seeds: int,
    variants: Sequence[Variant],
    say: Callable[[str], None],
    data: Path | None = None,
) -> list[dict[str, Any]]:
    """Train with every variant; return scores and bytes, those of float32 every step as the measure."""
    rows = []
    for variant in variants:
        for seed in range(seeds):
            final, size = Exchange(variant, workload, seed, data).train()
            plain = 2 * WORKERS * _FLOAT * workload.steps * _values(workload, seed, data)
            rows.append(
                {
                    "variant": variant.name,
                    "workload": workload.name,
                    "seed": seed,
                    "final": final,
                    "bytes": size,
                    "fewer_bytes": plain / size,
                }
            )
            say(f"{workload.name}, {variant.name}: {final:.3f}, {plain / size:.0f} x fewer bytes")
    return rows


class Exchange:
    """Workers that train by themselves and agree every few steps."""

    def __init__(self, variant: Variant, workload: Workload, seed: int, data: Path | None) -> None:
        self._variant, self._workload = variant, workload
        self._material = workload.material(seed, data)
        order = torch.from_numpy(workload.batches(seed, self._material.count))
        self._batches = order.view(workload.steps, WORKERS, -1)
        first = self._material.build()
        self._models = [first, *(copy.deepcopy(first) for _ in range(WORKERS - 1))]
        self._optimizers = [self._material.optimizer(model) for model in self._models]
        self._layout = Layout.of([tuple(parameter.shape) for parameter in first.parameters()])
        self._anchor = _flat(first)
        self._kept = [Feedback(make(variant.codec), self._layout) for _ in range(WORKERS)]
        self._reply = Feedback(make(variant.reply), self._layout)
        self._bytes = 0
        self._then: list[Vector] | None = None  # the parameters when the round under way began

    def train(self) -> tuple[float, int]:
        """Return the score of what is agreed on in the end, and the bytes of all workers, both ways."""
        rate = rate_of("shoestring-local", self._workload)
        for step in range(self._workload.steps):
            for worker, model in enumerate(self._models):
                for group in self._optimizers[worker].param_groups:
                    group["lr"] = self._workload.rate(step, rate)
                torch.autograd.backward(self._material.loss(model, self._batches[step, worker]))
                self._optimizers[worker].step()
                self._optimizers[worker].zero_grad()
            is_warming_up = step < self._variant.warmup
            since = step + 1 - self._variant.warmup
            if self._then is not None and (since - self._variant.late) % self._variant.h == 0:
                self._go_on()
            if is_warming_up or since % self._variant.h == 0:
                self._agree(is_warming_up)
                if is_warming_up or not self._variant.late:
                    self._go_on()
        model = self._models[0]
        _write(model, self._anchor)
        return self._material.score(model.train(False)), self._bytes

    def _agree(self, is_lossless: bool) -> None:
        sums = np.zeros_like(self._anchor)
        self._then = [_flat(model) for model in self._models]
        for worker, then in enumerate(self._then):
            sums += self._send(self._kept[worker], then - self._anchor, is_lossless)
        mean = sums / np.float32(WORKERS)
        self._anchor = self._anchor + self._send(self._reply, mean, is_lossless, times=WORKERS)

    def _go_on(self) -> None:
        """From what was agreed on, and what a worker's parameters have moved by meanwhile."""
        then, self._then = self._then or [], None
        for worker, model in enumerate(self._models):
            start: Vector = (_flat(model) - then[worker]) + self._anchor
            if self._variant.goes_on and self._variant.has_feedback:
                self._kept[worker].lend(start)
            _write(model, start)

    def _send(self, feedback: Feedback, values: Vector, is_lossless: bool, times: int = 1) -> Vector:
        codec: Codec = make("float32") if is_lossless else feedback.codec
        own = Feedback(codec, self._layout)
        own.load({"kept": feedback.kept})
        payload = own.encode(values)
        feedback.load({"kept": own.kept if self._variant.has_feedback else np.zeros_like(values)})
        self._bytes += times * len(payload)
        sent = np.zeros_like(values)
        codec.decode(payload, self._layout, sent)
        return sent


def _values(workload: Workload, seed: int, data: Path | None) -> int:
    return sum(parameter.numel() for parameter in workload.material(seed, data).build().parameters())


def _flat(model: nn.Module) -> Vector:
    flat: Vector = torch.cat([p.detach().reshape(-1) for p in model.parameters()]).numpy()
    return flat


def _write(model: nn.Module, values: Vector) -> None:
    torch.nn.utils.vector_to_parameters(torch.from_numpy(values.copy()), model.parameters())
