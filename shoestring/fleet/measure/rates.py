"""Measure what a device does at best: copy memory, multiply matrices, take data from the host.

`python -m shoestring.fleet.measure.rates` measures what its process sees and prints it as JSON. The
fleet runs that as it runs a job, under the same limits, so a CPU device with a third of a
core is measured as such.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from shoestring.errors import FleetError
from shoestring.fleet.engine.base import Engine, Task
from shoestring.fleet.engine.devices import Device, Rates

_COPY_BYTES = {"cpu": 1 << 26, "cuda": 1 << 29}  # far more than any cache holds
_SIDE = {"cpu": 768, "cuda": 8192}
_REPEATS = 5
_LONGEST_S = 300.0
_LEAST_S = 0.1  # a share of a core comes in slices: shorter times would measure a slice


def measure_rates(engine: Engine, device: Device, folder: Path) -> Rates:
    """Measure a device through an engine; its output goes to `folder`."""
    output = folder / "output.log"
    output.unlink(missing_ok=True)
    running = engine.start(Task(f"rates-{device.name}", ["-m", __name__], (device,), folder))
    try:
        code = running.wait(_LONGEST_S)
    finally:
        running.kill()
    lines = output.read_text(errors="replace").splitlines() if output.exists() else []
    try:
        return msgspec.json.decode(lines[-1], type=Rates)
    except (IndexError, msgspec.MsgspecError):
        raise FleetError(
            f"device `{device.name}` could not be measured (exit code {code})",
            hint=f"look at `{output}`; measuring needs torch: `pip install 'shoestring[torch]'`",
        ) from None


def measure_here() -> dict[str, float | None]:
    """Return the fields of `Rates` for the GPU this process sees, or for its CPU cores."""
    import torch

    kind = "cuda" if torch.cuda.is_available() else "cpu"
    wait = torch.cuda.synchronize if kind == "cuda" else (lambda: None)
    source = torch.zeros(_COPY_BYTES[kind] // 4, device=kind)
    target = torch.empty_like(source)
    copy_s = _best_s(lambda: target.copy_(source), wait)
    upload_s = None
    if kind == "cuda":
        host = torch.zeros(_COPY_BYTES[kind] // 4, pin_memory=True)
        upload_s = _best_s(lambda: target.copy_(host, non_blocking=True), wait)
    # As models train: half precision where the device has units for it.
    precision = torch.bfloat16 if kind == "cuda" else torch.float32
    a = torch.randn(_SIDE[kind], _SIDE[kind], device=kind).to(precision)
    matmul_s = _best_s(lambda: a @ a, wait)
    return {
        "copy_bytes_s": _COPY_BYTES[kind] / copy_s,
        "matmul_flop_s": 2 * _SIDE[kind] ** 3 / matmul_s,
        "upload_bytes_s": None if upload_s is None else _COPY_BYTES[kind] / upload_s,
    }


def _best_s(call: Callable[[], object], wait: Callable[[], object]) -> float:
    call()
    wait()
    calls, best = 1, float("inf")
    done = 0
    while done < _REPEATS:
        start = time.perf_counter()
        for _ in range(calls):
            call()
        wait()
        seconds = time.perf_counter() - start
        if seconds < _LEAST_S:
            calls *= 2
            continue
        best, done = min(best, seconds / calls), done + 1
    return best


if __name__ == "__main__":
    print(json.dumps(measure_here()))
