"""One of the two processes that run cases: `WORLD FOLDER CASE...`.

A case leaves `FOLDER/N/worker-R.json` and a safetensors file, N being its place on the command
line. After a refusal by both workers the next case follows, as after a case that came through; after
any other error this process ends, so that the next case has processes of its own.
"""

import faulthandler
import os
import random
import sys
import threading
import traceback
import zlib
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import numpy as np
import torch

import shoestring
from benchmarks.compatibility.case import Case
from benchmarks.compatibility.cases import CASES
from benchmarks.compatibility.outcome import Error, Facts, Outcome, flatten
from benchmarks.compatibility.shake import Shaken
from benchmarks.compatibility.worlds import (
    WORKERS,
    DdpWorld,
    LocalWorld,
    WrapModelWorld,
    WrapOptimizerWorld,
    await_files,
    bare,
)
from shoestring.errors import LinkError, ShoestringError

FAILED = 70
DDP = "ddp"
_WORLDS = {"wrap-model": WrapModelWorld, "wrap-optimizer": WrapOptimizerWorld, "local": LocalWorld}
_OTHER_S = 3.0  # the other worker may be about to say the same
_SLACK_S = 15.0


def main(world: str, folder: Path, names: list[str]) -> None:
    """Run the cases one after the other, in step with the other worker."""
    os.dup2(2, 1)  # stdout is for figures
    torch.set_num_threads(1)
    rank = _enter(world, folder)
    for number, name in enumerate(names):
        own = folder / str(number)
        if world == DDP:
            _run(CASES[name], world, own / "shaken", rank, Shaken())
            _await_other(CASES[name], own / "shaken", rank)
        _run(CASES[name], world, own, rank, nullcontext())
        if number + 1 < len(names):
            _await_other(CASES[name], own, rank)
    _leave_failed(folder / str(len(names) - 1), rank)
    if world == DDP:
        torch.distributed.destroy_process_group()


def _enter(world: str, folder: Path) -> int:
    if world == DDP:
        rank = int(os.environ["RANK"])
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORKERS
        )
        return rank
    if world == "wrap-model":  # which calls `init` itself
        return int(os.environ["SHOESTRING_WORKER"])
    return shoestring.init().worker


def _run(case: Case, world: str, folder: Path, rank: int, around: AbstractContextManager[None]) -> None:
    (folder / "files").mkdir(parents=True, exist_ok=True)
    path = folder / f"worker-{rank}"
    watch = _watch(case, path)
    here = (DdpWorld if world == DDP else _WORLDS[world])(rank, folder / "files")
    torch.manual_seed(zlib.crc32(case.name.encode()))
    random.seed(0)
    np.random.seed(0)
    try:
        with around:
            found = case.script(here)
        values = flatten({name: inner(value) for name, value in found.items()})
        Outcome(Facts([*here.losses], here.moved()), here.settle(values)).write(path)
    except Exception as error:
        Outcome(Facts([*here.losses], error=_describe(error))).write(path)
    watch.cancel()
    faulthandler.cancel_dump_traceback_later()


def _await_other(case: Case, folder: Path, rank: int) -> None:
    """Go on only when both workers have come through a case."""
    _leave_failed(folder, rank)
    both = [folder / f"worker-{each}" for each in range(WORKERS)]
    if not await_files([path.with_suffix(".json") for path in both], case.limit_s + _SLACK_S):
        _leave()
    if len({_is_refused(path) for path in both}) > 1:
        _leave()


def _leave_failed(folder: Path, rank: int) -> None:
    """End this process if its case failed, but not before the other could say the same."""
    if _is_refused(folder / f"worker-{rank}") is None:
        await_files([folder / f"worker-{each}.json" for each in range(WORKERS)], _OTHER_S)
        _leave()


def _is_refused(path: Path) -> bool | None:
    """Whether a worker's case was refused; none after any other error."""
    outcome = Outcome.read(path)
    error = None if outcome is None else outcome.facts.error
    if outcome is None or (error is not None and not error.is_refusal):
        return None
    return error is not None


def inner(value: object) -> object:
    """What `flatten` is to look at: a model without its wrapping."""
    return bare(value) if isinstance(value, torch.nn.Module) else value


def _describe(error: Exception) -> Error:
    text = traceback.format_exc()
    kind = type(error).__name__
    if not isinstance(error, ShoestringError):
        return Error(kind, str(error), traceback=text)
    # A time-out and "please report it" say nothing about the script.
    is_refusal = bool(error.hint) and not isinstance(error, LinkError) and "report it" not in error.hint
    return Error(kind, error.message, error.hint, is_refusal, text)


def _watch(case: Case, path: Path) -> threading.Timer:
    """End this process when a case takes too long, and say where it was."""
    main_thread = threading.main_thread().ident

    def give_up() -> None:
        frame = sys._current_frames().get(main_thread or 0)
        lines = traceback.format_stack(frame) if frame is not None else []
        places = [line.strip().splitlines()[0] for line in lines]
        error = Error("Hang", f"no end within {case.limit_s:g} s", traceback="\n".join(places))
        Outcome(Facts(error=error)).write(path)
        _leave()

    timer = threading.Timer(case.limit_s, give_up)
    timer.daemon = True
    timer.start()
    faulthandler.dump_traceback_later(case.limit_s + _SLACK_S, exit=True)  # if that thread cannot run
    return timer


def _leave() -> None:
    sys.stderr.flush()
    os._exit(FAILED)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
