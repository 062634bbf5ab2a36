"""One job on two devices of unequal speed: even shares against shares that follow the speed.

Two worker processes, each on a core of its own; a control group gives one of them a share of
its core's time (that takes root). Both trainings do the same steps on the same global batches.
Throughput is that of the last steps, when the shares have settled.

Figures count only if both trainings ended with the same parameters but for rounding, on all
workers with the same bits.
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shoestring.config import Run
from shoestring.errors import ShoestringError, UsageError
from shoestring.fleet.engine.quota import Quota
from shoestring.launch.local import run_local
from shoestring.server.warmup import warm_up

STEPS, MEASURED = 260, 80
_ROUNDING = 1e-3  # of the largest parameter: float32 sums in another order, through the steps of a training


@dataclass(frozen=True)
class SplitRow:
    """How one of the two trainings went."""

    batch: str  # `even` or `auto`
    shares: list[int]  # samples of a step, in the end
    samples_per_s: float


def run_split(folder: Path, slowdown: float, say: Callable[[str], None]) -> list[SplitRow]:
    """Train with even shares and with `auto`; return how fast each was."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise UsageError("one core is no two devices", hint="run it where there are two")
    warm_up()
    rows, ends = [], []
    quota = Quota("split", 1 / slowdown)
    try:
        for batch in ("even", "auto"):
            say(f"training with batch={batch}, one device {slowdown:g} times as fast as the other")
            own = folder / batch
            own.mkdir(parents=True, exist_ok=True)
            script = ["-m", "benchmarks.split.training", str(own), batch, str(quota.folder)]
            outcome = run_local(
                [*script, f"{cores[0]},{cores[1]}"],
                Run(name=f"split-{batch}", workers=2, folder=own, codec="float32", policy="every:delay=0"),
                shards=1,
                threads=1,
            )
            if outcome.failure is not None:
                raise ShoestringError(
                    f"{outcome.failure.who} failed with exit code {outcome.failure.code}",
                    hint="its last lines are above",
                )
            told = [json.loads((own / f"worker-{worker}.json").read_text()) for worker in range(2)]
            if told[0]["hash"] != told[1]["hash"]:
                raise ShoestringError("the workers ended with different parameters", hint="please report it")
            ends.append(np.load(own / "parameters.npy"))
            shares = [one["share"] for one in told]
            rows.append(SplitRow(batch, shares, told[0]["samples_per_s"]))
            say(f"{batch}: shares {shares}, {rows[-1].samples_per_s:,.0f} samples/s")
    finally:
        quota.close()
    apart = float(np.abs(ends[0] - ends[1]).max() / np.abs(ends[0]).max())
    if not apart < _ROUNDING:
        raise ShoestringError(f"the two trainings ended {apart:.2g} apart", hint="please report it")
    return rows
