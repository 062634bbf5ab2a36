"""A script's side of the contract with a fleet that runs it: see `fleet/contract.py`.

Without a fleet's variables in the environment nothing happens. With them the script is a trial,
whose steps are timed, or ends behind a checkpoint once the fleet asks for it.

Both look when a step begins: then the step before is whole, its schedulers moved on and its
checkpoint taken, so nothing is lost by ending there.
"""

import atexit
import os
import resource
import sys
import time
from collections.abc import Mapping
from typing import Any, NoReturn

import torch

from shoestring.checkpoint.schedule import Schedule
from shoestring.fleet.contract import (
    FEWEST_STEPS,
    MEMORY_BYTES,
    STOP,
    STOPPED,
    TrialRequest,
    TrialResult,
    read_number,
)
from shoestring.worker import session

_WARMUP = 5  # steps that are not timed: kernels are chosen, memory is taken
_LONGEST_S = 20.0  # of timed steps, unless the request asks for more
_LOOK_S = 0.01


class Trial:
    """Times steps and ends the script, as the environment says."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._request = TrialRequest.of(environment)
        self._is_written = False
        self._stop = environment.get(STOP, "")
        self._schedule = Schedule(read_number(environment, "SHOESTRING_EVERY"))
        self._times: list[float] = []
        self._first_at = 0.0
        self._begun = 0
        self._rounds: int | None = None  # that were whole when the last step began
        if self._request is not None:
            # For a script that ends before it has taken all the steps of the request.
            atexit.register(self._write_result, self._request)
        if limit := read_number(environment, MEMORY_BYTES):
            _limit_memory(limit)

    def step_begins(self, rounds: int) -> None:
        """Look whether the script is to end; `rounds` are those that are whole."""
        if self._request is not None:
            self._time_step(self._request)
        is_saved = self._schedule.is_due(rounds) and self._rounds not in (None, rounds)
        if self._stop and is_saved and os.path.exists(self._stop):
            _leave(STOPPED)
        self._rounds = rounds
        self._begun += 1

    def _time_step(self, request: TrialRequest) -> None:
        if _is_on_gpu():
            torch.cuda.synchronize()
        if self._begun == 0:
            self._first_at = time.time()
        if self._begun == 1:
            _wait_at_gate(request)
        now = time.perf_counter()
        if self._begun >= _WARMUP:
            self._times.append(now)
        taken, seconds = len(self._times) - 1, now - self._times[0] if self._times else 0.0
        is_enough = taken >= request.steps and seconds >= request.seconds
        if is_enough or (taken >= FEWEST_STEPS and seconds > max(_LONGEST_S, request.seconds)):
            self._write_result(request)
            _leave(0)

    def _write_result(self, request: TrialRequest) -> None:
        """Write the timed steps, unless they are too few or written already."""
        if not self._is_written and len(self._times) > FEWEST_STEPS:
            self._measured().write(request.result)
        self._is_written = True

    def _measured(self) -> TrialResult:
        peak_bytes, beside_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, 0
        if _is_on_gpu():
            free, total = torch.cuda.mem_get_info()
            peak_bytes = torch.cuda.max_memory_reserved()
            # The CUDA context of this process, and the memory of all other processes.
            beside_bytes = max(0, total - free - torch.cuda.memory_reserved())
        return TrialResult(
            [b - a for a, b in zip(self._times, self._times[1:], strict=False)],
            self._first_at,
            time.time(),
            peak_bytes,
            beside_bytes,
        )


def _wait_at_gate(request: TrialRequest) -> None:
    """Wait until the fleet opens the gate, when all that train beside this script have started."""
    if request.gate is None:
        return
    request.ready.touch()
    while not request.gate.exists():
        time.sleep(_LOOK_S)  # a file that another process is to make cannot be waited for


def _is_on_gpu() -> bool:
    is_initialized: Any = torch.cuda.is_initialized
    return bool(is_initialized())


def _limit_memory(limit: int) -> None:
    if torch.cuda.is_available():
        total = torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total))


def _leave(code: int) -> NoReturn:
    # Here, not when the interpreter ends: its thread pools are gone then, and a shard in this
    # process may still have work, as part of this step's gradient is with it already.
    session.end()
    sys.exit(code)
