"""Run cases in pairs of processes, and compare each with DDP.

Several cases share a pair, one after the other, to save the start. After an error that is no refusal
the rest go on in a new pair. A case that came out wrong after others runs once more by itself.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.compatibility.case import Case
from benchmarks.compatibility.cases import CASES
from benchmarks.compatibility.compare import EXACT, Pair, Reference, Row, judge
from benchmarks.compatibility.outcome import Error, Facts, Outcome
from benchmarks.compatibility.worker import DDP
from benchmarks.compatibility.worlds import WORKERS
from shoestring.config import Run
from shoestring.launch.local import run_local
from shoestring.server.warmup import warm_up

LOSSY = "dct"
SHARDS = 2
TOGETHER = 40  # cases of a pair of processes: a run has at most 64 models
_POLICIES = {"wrap-model": "every", "wrap-optimizer": "every", "local": "local:2"}
_START_S = 60.0
_END_S = 10.0
_LOOK_S = 0.02
_ROOT = Path(__file__).parents[2]

# A choice for tests: some of everything.
QUICK = (
    "SGD, momentum",
    "AdamW",
    "RMSprop",
    "Muon beside AdamW",
    "groups with rates of their own",
    "OneCycleLR, betas, before `wrap`",
    "GradScaler, `unscale_`, clipping, overflow on one worker",
    "clipping by norm",
    "clipping by value",
    "accumulation in `no_sync`",
    "accumulation without `no_sync`",
    "`continue` after backward, zeroing first in the loop",
    "NaN on one worker, the step left out by its norm",
    "weights clamped after each step",
    "unfrozen halfway",
    "adapters on a frozen base",
    "GAN, two models, two optimizers",
    "BatchNorm",
    "tied weights",
    "parameters that one worker does not use",
    "mean of weights by deepcopy after `wrap`",
    "bf16 parameters, AdamW",
    "saved while wrapped, loaded in plain torch: Adam",
    "state of plain torch loaded after `wrap`: Adam",
    "a loaded optimizer's rate counts",
    "compiled after `wrap`",
)

Say = Callable[[str], None]


@dataclass(frozen=True)
class Setting:
    """How cases are run."""

    mode: str
    codec: str

    def __str__(self) -> str:
        return f"{self.mode}, {self.codec}"


SETTINGS = tuple(Setting(mode, codec) for mode in _POLICIES for codec in (EXACT, LOSSY))


def measure(
    names: Sequence[str], settings: Sequence[Setting], folder: Path, say: Say, *, together: int = TOGETHER
) -> list[Row]:
    """Run the cases under DDP and in every setting; return a row for each."""
    warm_up()
    chosen = [CASES[name] for name in names]
    plain = _Pairs(DDP, None, folder / DDP, say, together).run(chosen)
    rows: list[Row] = []
    for setting in settings:
        own = [case for case in chosen if setting.mode in case.modes]
        place = folder / f"{setting.mode}-{setting.codec}"
        found = _Pairs(setting.mode, setting, place, say, together).run(own)
        for case in own:
            reference = Reference(_read(plain[case.name]), _read(plain[case.name] / "shaken"))
            row = judge(case, setting.mode, setting.codec, reference, _read(found[case.name]))
            if row.result == "wrong" and found[case.name].name != "0":  # other cases came before
                again = _Pairs(setting.mode, setting, place / "again" / str(len(rows)), say, 1).run([case])
                alone = judge(case, setting.mode, setting.codec, reference, _read(again[case.name]))
                row = (
                    alone if alone.result == "wrong" else replace(row, message=f"after others: {row.message}")
                )
            rows.append(row)
            say(f"{setting}: {row.case}: {row.result} {row.message}")
    return rows


class _Pairs:
    """Runs cases in one world, in as many pairs of processes as it takes."""

    def __init__(self, world: str, setting: Setting | None, folder: Path, say: Say, together: int) -> None:
        self._world = world
        self._setting = setting
        self._folder = folder
        self._say = say
        self._together = together
        self._count = 0

    def run(self, cases: Sequence[Case]) -> dict[str, Path]:
        """Return for each case the folder with what its workers told."""
        left, found = list(cases), {}
        must_be_first = False
        while left:
            began = time.monotonic()
            own = self._next(left, 1 if must_be_first else self._together)
            place = self._folder / str(self._count)
            self._count += 1
            place.mkdir(parents=True)
            self._start(place, own)
            must_be_first = False
            for number, case in enumerate(own):
                told = place / str(number)
                is_whole = _is_whole(told) and (self._world != DDP or _is_whole(told / "shaken"))
                if not is_whole and number > 0:
                    must_be_first = _has_begun(told)
                    break
                if not is_whole:
                    _note_crash(told)
                found[case.name] = told
                left.remove(case)
                if not is_whole:
                    break
            what = self._setting or self._world
            self._say(f"{what}: {len(found)} of {len(cases)} cases, {time.monotonic() - began:.0f} s")
        return found

    def _next(self, left: list[Case], most: int) -> list[Case]:
        if left[0].alone:
            return left[:1]
        return [case for case in left if not case.alone][:most]

    def _start(self, place: Path, cases: list[Case]) -> None:
        arguments = [self._world, str(place), *(case.name for case in cases)]
        command = ["-m", "benchmarks.compatibility.worker", *arguments]
        limit_s = _START_S + 2 * sum(case.limit_s for case in cases)
        if self._setting is None:
            _run_ddp([sys.executable, *command], limit_s)
            return
        run = Run(
            name="compatibility",
            workers=WORKERS,
            folder=place / "run",
            codec=self._setting.codec,
            policy=_POLICIES[self._setting.mode],
        )
        (place / "run").mkdir()
        run_local(command, run, shards=SHARDS, threads=1)


def _run_ddp(command: list[str], limit_s: float) -> None:
    """Run both processes of DDP; when one fails, the other ends soon."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "WORLD_SIZE": str(WORKERS)}
    workers = [
        subprocess.Popen(
            command,
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            cwd=_ROOT,
            stdout=subprocess.DEVNULL,
        )
        for rank in range(WORKERS)
    ]
    end = time.monotonic() + limit_s
    try:
        while any(worker.poll() is None for worker in workers) and time.monotonic() < end:
            if any(worker.returncode for worker in workers):
                end = min(end, time.monotonic() + _END_S)
            time.sleep(_LOOK_S)
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


def _read(folder: Path) -> Pair:
    first, second = (Outcome.read(folder / f"worker-{rank}") for rank in range(WORKERS))
    return first, second


def _is_whole(folder: Path) -> bool:
    """Whether both workers came through a case, or both refused it."""
    told = {
        outcome is not None and (outcome.facts.error.is_refusal if outcome.facts.error else "came through")
        for outcome in _read(folder)
    }
    return len(told) == 1 and False not in told


def _has_begun(folder: Path) -> bool:
    return folder.is_dir()


def _note_crash(folder: Path) -> None:
    """Where a worker ended without a word, write one: a crash must not look like a refusal."""
    pairs = [folder / "shaken", folder] if (folder / "shaken").is_dir() else [folder]
    if any(outcome is not None and outcome.facts.error for pair in pairs for outcome in _read(pair)):
        return
    pairs[0].mkdir(parents=True, exist_ok=True)
    error = Error("Crash", "a worker ended without a word")
    Outcome(Facts(error=error)).write(pairs[0] / "worker-0")
