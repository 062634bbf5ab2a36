"""What a fleet asks of a script it runs, through the environment; nothing without one.

| variable | what happens |
|---|---|
| `SHOESTRING_PROBE` | some steps are timed, written to this file as JSON, and the script ends |
| `SHOESTRING_PROBE_STEPS` | at least so many, after the first few |
| `SHOESTRING_PROBE_SECONDS` | at least for so long |
| `SHOESTRING_PROBE_GATE` | after one step it says so in `.ready` beside the result, and waits for this file |
| `SHOESTRING_STOP` | once this file is there the script ends behind its next checkpoint |
| `SHOESTRING_MEMORY_BYTES` | the most GPU memory this process may take |

It looks when a step begins: then the step before is whole, its schedulers moved on and its
checkpoint taken, so nothing is lost by ending there.
"""

import atexit
import json
import os
import resource
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch

from shoestring.errors import UsageError
from shoestring.worker import session

STOPPED = 75  # the exit code of a script that ended because it was asked to

_WARMUP = 5  # steps that are not timed: kernels are chosen, memory is taken
_LONGEST_S = 20.0  # unless it is asked for longer
_FEWEST = 3
_LOOK_S = 0.01


class Probe:
    """Times steps and ends the script, as the environment says."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._result = environment.get("SHOESTRING_PROBE", "")
        self._steps = _number(environment, "SHOESTRING_PROBE_STEPS") or 20
        self._seconds = _number(environment, "SHOESTRING_PROBE_SECONDS")
        self._gate = environment.get("SHOESTRING_PROBE_GATE", "")
        self._stop = environment.get("SHOESTRING_STOP", "")
        self._every = _number(environment, "SHOESTRING_EVERY")
        self._times: list[float] = []
        self._first_at = 0.0
        self._begun = 0
        self._rounds: int | None = None  # that were whole when the last step began
        if self._result:
            atexit.register(self._write_result)  # for a script that is shorter than what was asked for
        if limit := _number(environment, "SHOESTRING_MEMORY_BYTES"):
            _limit_memory(limit)

    def step_begins(self, rounds: int) -> None:
        """Look whether the script is to end; `rounds` are those that are whole."""
        if self._result:
            self._time_step()
        is_saved = self._every > 0 and rounds % self._every == 0 and self._rounds not in (None, rounds)
        if self._stop and is_saved and os.path.exists(self._stop):
            _leave(STOPPED)
        self._rounds = rounds
        self._begun += 1

    def _time_step(self) -> None:
        if _is_on_gpu():
            torch.cuda.synchronize()
        if self._begun == 0:
            self._first_at = time.time()
        if self._begun == 1 and self._gate:
            self._wait_at_gate()
        now = time.perf_counter()
        if self._begun >= _WARMUP:
            self._times.append(now)
        taken, seconds = len(self._times) - 1, now - self._times[0] if self._times else 0.0
        is_enough = taken >= self._steps and seconds >= self._seconds
        if is_enough or (taken >= _FEWEST and seconds > max(_LONGEST_S, self._seconds)):
            self._write_result()
            _leave(0)

    def _wait_at_gate(self) -> None:
        """Wait until those that train beside this script are there; the fleet opens the gate or ends it."""
        Path(self._result).with_suffix(".ready").touch()
        while not os.path.exists(self._gate):
            time.sleep(_LOOK_S)  # a file that another process is to make cannot be waited for

    def _write_result(self) -> None:
        """Write what was timed, unless it is too little or written already."""
        path, self._result = self._result, ""
        if path and len(self._times) > _FEWEST:
            _write(Path(path), self._facts())

    def _facts(self) -> dict[str, Any]:
        steps = [b - a for a, b in zip(self._times, self._times[1:], strict=False)]
        facts: dict[str, Any] = {
            "step_s": steps,
            "first_at": self._first_at,
            "ended_at": time.time(),
            "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }
        if _is_on_gpu():
            free, total = torch.cuda.mem_get_info()
            facts["peak_bytes"] = torch.cuda.max_memory_reserved()
            # What is taken beside the allocator: the context, and whatever else runs there.
            facts["beside_bytes"] = max(0, total - free - torch.cuda.memory_reserved())
        return facts


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


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name) or "0"
    if not text.isdecimal():
        raise UsageError(f"`{name}` is `{text}`, expected a whole number", hint=f"unset `{name}`")
    return int(text)


def _write(path: Path, facts: dict[str, Any]) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(facts))
    part.replace(path)
